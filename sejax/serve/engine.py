"""The engine: a thread around the loop body, and what other threads may ask of it."""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sejax import step
from sejax.cache import chain
from sejax.kernels.launch import on_gpu
from sejax.models import Model
from sejax.serve.core import Core
from sejax.serve.device import Device
from sejax.serve.live import FORCED, STOPS
from sejax.serve.pace import Pace
from sejax.serve.plan import Sizes
from sejax.serve.request import Delta, Finish, InvalidRequest, Mark, Prompt, Sampling, Sink, Stats, Usage
from sejax.serve.sequence import Request
from sejax.serve.text import TextStream
from sejax.types import Method

CHUNKS = (32, 128, 512)
SHORT_LANE = 2048  # token rows of the second prefill lane: a short prompt need not wait for a long one


class Result(NamedTuple):
    """A whole answer. ids: sampled tokens, a stop token included; text: without stop string or special tokens."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    usage: Usage
    error: str | None = None


class _NoText:
    """Stands in for a tokenizer the model does not have."""

    def token_bytes(self, id: int) -> bytes:
        return b""


class Engine:
    """Serves many sequences of one model under one KV method, with continuous batching.

    model, method: as from sejax.load and sejax.method. max_len: longest context in tokens (default: the model's).
    rows: most sequences in one decode step. slots: sessions held at once (default 2 * rows), those between turns included.
    kv_tokens: tokens the pool of a method that keeps everything can hold, all sessions together (default 4 * max_len, at
    most slots * max_len); other methods allocate each session's whole run. chunks: prefill bucket sizes. burst: decode steps of
    one program while nobody streams (default: 8 on a GPU, where a step may be shorter than the host's work for it, else 1).
    progress(done, total): called while programs compile. seed: for requests that give none (default: random).

    `start` compiles everything and begins to serve; used as a context manager, or through `generate`, it is called for you.
    Raises ValueError for sizes that cannot work.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        *,
        max_len: int | None = None,
        rows: int = 8,
        slots: int | None = None,
        kv_tokens: int | None = None,
        chunks: Sequence[int] = CHUNKS,
        max_queue: int = 1024,
        burst: int | None = None,
        name: str = "sejax",
        seed: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.model, self.method, self.name = model, method.fitted(model), name
        self.max_len = max_len or model.config.max_position
        self._slots = slots or 2 * rows
        self._chunks = tuple(sorted(c for c in chunks if c <= max(self.max_len, min(chunks))))
        self._rows, self._max_queue, self._progress = rows, max_queue, progress
        self._burst = burst or (8 if on_gpu() else 1)
        self._kv_tokens = min(kv_tokens or 4 * self.max_len, self._slots * self.max_len)
        if rows < 1 or self._slots < rows:
            raise ValueError(f"rows={rows} and slots={self._slots}: need rows >= 1 and at least one slot for each row")
        if self._kv_tokens < self.max_len:
            raise ValueError(f"kv_tokens={self._kv_tokens} cannot hold one request of max_len={self.max_len} tokens; give at least that")
        self._seed = secrets.randbits(62) if seed is None else seed
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()  # guards _pending and the start; everything else belongs to the engine thread
        self._thread: threading.Thread | None = None
        self._core: Core | None = None
        self._moved = time.monotonic()
        self._rejected = 0
        self._closing: float | None = None
        self._failure: str | None = None

    # ---- life ----

    @property
    def ready(self) -> bool:
        """Compiled, and the engine thread is alive."""
        return self._core is not None and self._failure is None and self._closing is None

    @property
    def failure(self) -> str | None:
        """Why the engine thread died, if it did."""
        return self._failure

    def start(self) -> None:
        """Allocate, compile, begin to serve. Returns when ready; a second call does nothing."""
        with self._lock:
            if self._thread is not None:
                return
            self._core = self._build()
            self._thread = threading.Thread(target=self._loop, name="sejax-engine", daemon=True)
            self._thread.start()

    def close(self, drain: float = 10.0) -> None:
        """Refuse new requests, let those in flight finish for `drain` seconds, cancel the rest, end the thread."""
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(("close", drain))
            self._thread.join(drain + 30)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0.0)

    def _build(self) -> Core:
        lanes = {0: self.max_len} | ({1: SHORT_LANE} if self.max_len > SHORT_LANE else {})
        staged = self.method.order == "layer"
        pages = None
        if self.method.growing:
            layers = step.layers_of(self.model.config, str(self.model.dtype), self.method, self.max_len)
            pages = max(record.pages(max(self._kv_tokens, record.run(self.max_len))) for _, record in layers)
        sizes = Sizes(
            slots=self._slots + (len(lanes) if staged else 0),
            rows=self._rows,
            max_len=self.max_len,
            pages=pages,
            stages=tuple(lanes.values()) if staged else (),
            chunks=self._chunks,
            burst=self._burst,
        )
        device = Device(self.model, self.method, sizes, self._progress)
        root = chain.root([str(self.method), repr(self.model.config), str(self.model.dtype)])
        return Core(device, self._slots, lanes, Pace(_unit_costs(device), _step_costs(device)), root)

    # ---- requests, from any thread ----

    def submit(self, prompt: Prompt, sampling: Sampling, sink: Sink, streams: bool = True) -> int:
        """Queue a request; `sink` gets its deltas from the engine thread. Returns its id.

        streams False: nobody reads before the end, so several steps may run as one program and deltas come in bursts.
        Raises InvalidRequest at once for what can never be served, or when the queue is full (status 429).
        """
        limit = self.limit(prompt, sampling)
        stop_ids = tuple(dict.fromkeys((*sampling.stop_ids, *(() if sampling.ignore_eos else self._eos_ids()))))
        if len(stop_ids) > STOPS:
            raise InvalidRequest(
                f"stop_token_ids: at most {STOPS - len(self._eos_ids())} ids, not {len(sampling.stop_ids)}.", "stop_token_ids"
            )
        if len(sampling.force_tokens) > FORCED:
            raise InvalidRequest(f"force_tokens: at most {FORCED} ids.", "force_tokens")
        if self._failure or self._closing is not None or self._core is None:
            raise InvalidRequest("The engine is not serving: " + (self._failure or "it is starting or shutting down."), status=503)
        with self._lock:
            if self._pending >= self._max_queue:
                self._rejected += 1
                raise InvalidRequest(f"The queue is full ({self._max_queue} requests). Try again later.", None, "queue_full", 429)
            self._pending += 1
        id = next(self._ids)
        text = TextStream(self.model.tokenizer or _NoText(), sampling.stop)
        self._inbox.put(
            ("submit", Request(id, prompt, sampling, self._counted(sink), limit, stop_ids, text, (self._seed + id) % 2**62, streams))
        )
        return id

    def limit(self, prompt: Prompt, sampling: Sampling) -> int:
        """Tokens the request may sample; raises InvalidRequest if the context cannot hold it."""
        size = len(prompt.ids)
        if size == 0:
            raise InvalidRequest("The prompt is empty: give at least one token.", "messages")
        vocab = self.model.config.vocab_size
        if min(prompt.ids) < 0 or max(prompt.ids) >= vocab:
            raise InvalidRequest(f"The prompt has token ids outside 0..{vocab - 1}.", "prompt")
        answer = sampling.max_tokens or max(1, self.max_len - size)
        if size + answer > self.max_len:
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_len} tokens. However, you requested {size + answer} tokens "
                f"({size} in the messages, {answer} in the completion). Please reduce the length of the messages.",
                "messages",
                "context_length_exceeded",
            )
        return answer

    def cancel(self, id: int) -> None:
        """Stop a request; its sink gets a last delta with finish "cancelled". Unknown and finished ids are ignored."""
        self._inbox.put(("cancel", id))

    def generate(self, prompts: Sequence[str | Sequence[int] | Prompt], sampling: Sampling | None = None) -> list[Result]:
        """Answers to prompts (text, token ids or Prompt), batched; blocks until all are done.

        Raises InvalidRequest for a prompt that cannot be served; nothing is generated then.
        """
        self.start()
        sampling = sampling or Sampling()
        asked = [self._prompt(p) for p in prompts]
        for prompt in asked:
            self.limit(prompt, sampling)
        inboxes: list[queue.SimpleQueue[Delta]] = [queue.SimpleQueue() for _ in asked]
        for prompt, inbox in zip(asked, inboxes, strict=True):
            self.submit(prompt, sampling, inbox.put, streams=False)
        return [collect(inbox.get) for inbox in inboxes]

    def _prompt(self, prompt: str | Sequence[int] | Prompt) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if not isinstance(prompt, str):
            return Prompt(tuple(int(i) for i in prompt))
        if self.model.tokenizer is None:
            raise InvalidRequest("This model has no tokenizer: give token ids.", "prompt")
        return Prompt(tuple(self.model.tokenizer.encode(prompt)), prompt)

    def _eos_ids(self) -> tuple[int, ...]:
        tokenizer = self.model.tokenizer
        return tuple(tokenizer.eos_ids if tokenizer else self.model.config.eos_ids)

    def marks(self) -> tuple[Mark, ...]:
        """Sessions that wait for their next turn: an immutable snapshot."""
        return self._core.marks if self._core else ()

    def stats(self) -> Stats:
        """A snapshot of counters and sizes; numbers may be a step old."""
        core = self._core
        if core is None:
            return Stats()
        sessions, counts, device = list(core.sessions.values()), core.counts, core.device
        capacity = device.sizes.pages * device.page if device.sizes.pages else sum(_runs(device)) / len(device.states) * self._slots
        return Stats(
            running=len(core.running) + len(core.prefilling),
            waiting=len(core.waiting) + len(core.paused),
            parked=len(core.parked),
            slots=self._slots,
            kv_bytes=device.kv_bytes,
            rows_held=int(sum(s.kept for s in sessions)),
            rows_capacity=int(capacity),
            tokens_held=sum(s.stored for s in sessions),
            step_age=time.monotonic() - self._moved if core.busy else 0.0,
            prompt_tokens=counts.get("prompt", 0),
            cached_tokens=counts.get("cached", 0),
            generated_tokens=counts.get("generated", 0),
            evicted_tokens=counts.get("evicted", 0),
            preemptions=counts.get("paused", 0),
            rejected=self._rejected,
            compiles=device.programs.compiles,
            compile_seconds=device.programs.seconds,
            finished=dict(core.finished),
        )

    def _counted(self, sink: Sink) -> Sink:
        def deliver(delta: Delta) -> None:
            if delta.finish is not None:
                with self._lock:
                    self._pending -= 1
            sink(delta)

        return deliver

    # ---- the engine thread ----

    def _loop(self) -> None:
        core = self._core
        assert core is not None
        try:
            while True:
                self._receive(core, wait=not core.busy)
                if self._closing is not None and (not core.busy or time.monotonic() > self._closing):
                    for request in core.requests():
                        core.cancel(request.id)
                    while core.busy:
                        core.turn()
                    return
                core.turn()
                self._moved = time.monotonic()
        except Exception as error:  # the thread ends: whoever waits must hear of it
            self._failure = f"{type(error).__name__}: {error}"
            for request in core.requests():
                request.close("error", error=self._failure)
            self._refuse()

    def _receive(self, core: Core, wait: bool) -> None:
        """Take what other threads asked for; with `wait`, until there is something."""
        while True:
            try:
                kind, what = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            self._moved = time.monotonic()
            if kind == "submit":
                assert isinstance(what, Request)
                core.waiting.append(what)
            elif kind == "cancel":
                core.cancel(int(what))  # type: ignore[call-overload]
            else:
                self._closing = time.monotonic() + float(what)  # type: ignore[arg-type]
                return

    def _refuse(self) -> None:
        while not self._inbox.empty():
            kind, what = self._inbox.get()
            if kind == "submit" and isinstance(what, Request):
                what.close("error", error=self._failure)


def collect(get: Callable[[], Delta]) -> Result:
    """Read deltas until the last one."""
    text, ids = [], []
    while True:
        delta = get()
        text.append(delta.text)
        ids.extend(delta.ids)
        if delta.finish is not None:
            assert delta.usage is not None
            return Result("".join(text), tuple(ids), delta.finish, delta.usage, delta.error)


def _runs(device: Device) -> list[int]:
    return [record.run(device.sizes.max_len) for _, record in device.plan.layers]


def _unit_costs(device: Device) -> dict[int, float]:
    """Seconds one prefill unit of each bucket takes, measured once on an idle slot."""
    costs = {}
    for bucket in device.sizes.chunks:
        times = []
        for _ in range(2):
            units = device.prefill([0] * min(bucket, device.sizes.max_len), 0, device.sizes.slots, device.sizes.slots, 0, True)
            jax.block_until_ready(next(units)[0])
            began = time.perf_counter()
            jax.block_until_ready(next(units, (np.zeros(0), 0))[0])
            times.append(time.perf_counter() - began)
        costs[bucket] = min(times)
    costs[device.width] = costs[bucket] * device.width / bucket
    return costs


def _step_costs(device: Device) -> dict[int, float]:
    """Seconds of a decode step, by batch bucket; measured once on idle rows."""
    found = {}
    for bucket in device.programs.row_buckets():
        times = []
        for _ in range(2):
            began = time.perf_counter()
            jax.block_until_ready(device.decode([device.sizes.slots] * bucket))
            times.append(time.perf_counter() - began)
        found[bucket] = min(times)
    return found
