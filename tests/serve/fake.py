"""An engine without a model: scripted answers from a real thread, with the interface and the manners of the real one."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

from sejax.serve.request import Delta, InvalidRequest, Mark, Prompt, Sampling, Sink, Stats, Usage
from sejax.serve.text import TextStream

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = ("AB", "DEF", "HI", "JK", "DE", "Fz", "Obs", "erv", "ation:", "hello", " world", "\n\n")


class FakeTokenizer:
    """Bytes 0..255, three special tokens, and a few longer pieces (longest match first); ChatML as the template."""

    chat_template = "ChatML: system user assistant tool"

    def __init__(self, adds_bos: bool = False):
        self.adds_bos, self.bos_id, self.eos_ids = adds_bos, 256, (256, 258)
        self.special_ids = frozenset(range(256, 259))
        self.pieces = [bytes([i]) for i in range(256)] + [b""] * 3 + [p.encode() for p in PIECES]
        self.vocab_size = len(self.pieces)
        self._ids = {p: 259 + i for i, p in enumerate(PIECES)}
        self._split = re.compile("|".join(map(re.escape, (*SPECIALS, *sorted(PIECES, key=len, reverse=True)))))

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        for match in self._split.finditer(text):
            ids += text[at : match.start()].encode()
            known = match.group()
            ids.append(256 + SPECIALS.index(known) if known in SPECIALS else self._ids[known])
            at = match.end()
        return [*ids, *text[at:].encode()]

    def token_bytes(self, id: int) -> bytes:
        return self.pieces[id]

    def decode(self, ids: Any) -> str:
        return b"".join(SPECIALS[i - 256].encode() if i in self.special_ids else self.pieces[i] for i in ids).decode(errors="replace")

    def render(self, messages: list[dict], tools: list | None = None, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        text = f"<|im_start|>system\nTools: {json.dumps(tools)}<|im_end|>\n" if tools else ""
        for i, message in enumerate(messages):
            if message["role"] == "system" and i:
                raise ValueError("System message must be at the beginning.")
            body = message["content"]
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, dict):
                    raise ValueError("arguments is not a mapping")
                body += f"<call>{call['function']['name']}({', '.join(f'{k}={v}' for k, v in arguments.items())})</call>"
            text += f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


@dataclasses.dataclass
class _Row:
    id: int
    prompt: Prompt
    sampling: Sampling
    sink: Sink
    text: TextStream
    began: float
    cached: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)


class FakeEngine:
    """Answers with `force_tokens`, then with `reply` and an end token (for ever, if eos is ignored), one token per `step` seconds.

    slots: rows that run at once. queue: how many may wait. prefill: silent seconds before the first token of every request.
    """

    def __init__(self, max_len: int = 512, slots: int = 4, queue: int = 64, step: float = 0.0005, prefill: float = 0.0):
        self.model = SimpleNamespace(tokenizer=FakeTokenizer())
        self.method, self.name, self.max_len = "full", "fake", max_len
        self.slots, self.queue, self.step, self.prefill = slots, queue, step, prefill
        self.reply: list[int] = self.model.tokenizer.encode("hello world")
        self.ready, self.failure = False, None
        self.crash: str | None = None  # set it: the loop raises, as a fault in a step would
        self.hold = False  # set it: the loop stands still
        self.submitted: list[tuple[Prompt, Sampling]] = []
        self._lock, self._waiting, self._running = threading.RLock(), [], []
        self._marks: list[Mark] = []
        self._count = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0, "rejected": 0}
        self._finished: dict[str, int] = {}
        self._moved, self._next, self._closing = time.monotonic(), 0, False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()
            self.ready = True

    def close(self, drain: float = 10.0) -> None:
        end = time.monotonic() + drain
        while self._thread and self._thread.is_alive() and (self._running or self._waiting) and time.monotonic() < end:
            time.sleep(0.01)
        self._closing = True
        if self._thread:
            self._thread.join(5)
        for row in [*self._running, *self._waiting]:
            self._end(row, "cancelled")

    def submit(self, prompt: Prompt, sampling: Sampling, sink: Sink, streams: bool = True) -> int:
        with self._lock:
            if len(self._waiting) >= self.queue:
                self._count["rejected"] += 1
                raise InvalidRequest(f"{len(self._waiting)} requests are waiting already; try again soon.", status=429)
            self._next += 1
            text = TextStream(self.model.tokenizer, sampling.stop)
            self._waiting.append(_Row(self._next, prompt, sampling, sink, text, time.monotonic()))
            self.submitted.append((prompt, sampling))
            return self._next

    def cancel(self, id: int) -> None:
        with self._lock:
            for row in [r for r in (*self._waiting, *self._running) if r.id == id]:
                self._end(row, "cancelled")

    def marks(self) -> tuple[Mark, ...]:
        return tuple(self._marks)

    def stats(self) -> Stats:
        with self._lock:
            return Stats(
                running=len(self._running),
                waiting=len(self._waiting),
                slots=self.slots,
                rows_capacity=self.slots * self.max_len,
                rows_held=sum(len(r.prompt.ids) + len(r.ids) for r in self._running),
                step_age=time.monotonic() - self._moved,
                finished=dict(self._finished),
                **self._count,
            )

    def _loop(self) -> None:
        try:
            while not self._closing:
                time.sleep(self.step)
                if self.hold:
                    continue
                self._moved = time.monotonic()
                if self.crash:
                    raise RuntimeError(self.crash)
                with self._lock:
                    while self._waiting and len(self._running) < self.slots:
                        self._admit(self._waiting.pop(0))
                    for row in list(self._running):
                        self._step(row)
        except Exception as error:
            with self._lock:
                self.failure = f"{type(error).__name__}: {error}"
                for row in [*self._running, *self._waiting]:
                    self._end(row, "error", self.failure)

    def _admit(self, row: _Row) -> None:
        self._running.append(row)
        same = [len(m.ids) for m in self._marks if row.prompt.ids[: len(m.ids)] == m.ids]
        row.cached = min(max(same, default=0), len(row.prompt.ids) - 1)
        self._count["prompt_tokens"] += len(row.prompt.ids)
        self._count["cached_tokens"] += row.cached

    def _step(self, row: _Row) -> None:
        if time.monotonic() - row.began < self.prefill:
            return
        sampling, at = row.sampling, len(row.ids)
        script = [*sampling.force_tokens, *([] if sampling.force_tokens and not sampling.ignore_eos else self.reply)]
        id = script[at] if at < len(script) else ord("x") if sampling.ignore_eos else 258
        row.ids.append(id)
        self._count["generated_tokens"] += 1
        text, stopped = row.text.push([id])
        ended = stopped or id in sampling.stop_ids or (id in self.model.tokenizer.eos_ids and not sampling.ignore_eos)
        finish = "stop" if ended else "length" if len(row.ids) >= (sampling.max_tokens or 10**9) else None
        if finish:
            self._end(row, finish, text=text, ids=(id,))
        else:
            row.sink(Delta(text, (id,)))

    def _end(self, row: _Row, finish: Any, error: str | None = None, text: str = "", ids: tuple[int, ...] = ()) -> None:
        for rows in (self._waiting, self._running):
            if row in rows:
                rows.remove(row)
        if finish in ("stop", "length"):
            text += row.text.finish()
            kept = (*row.prompt.ids, *row.ids[: row.text.committed])
            self._marks = [*self._marks[-7:], Mark(row.prompt.text + self.model.tokenizer.decode(kept[len(row.prompt.ids) :]), kept)]
        self._finished[finish] = self._finished.get(finish, 0) + 1
        usage = Usage(len(row.prompt.ids), row.cached, len(row.ids), float(len(row.prompt.ids) + len(row.ids)))
        row.sink(Delta(text, ids, finish, usage, error))
