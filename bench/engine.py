"""The engine's numbers on a CPU: `python -m bench.engine overhead|concurrency|compiles|ttft [METHOD ...]`.

Each case prints one JSON line a method and appends it to bench/results/cpu.jsonl. `ratio` is what `target` limits: the step
beside the bare one, one after another beside all at once, the next turn beside the cold one. Run on an idle machine.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sejax
from bench.timing import RESULTS, commit
from sejax.serve.console import compiling, keep_programs
from sejax.serve.request import Delta

MODEL = "smollm2-135m"
CORES = 2
ALL = ("full", "snapkv:budget=1024", "streamingllm:recent=1020", "quest:budget=1024")
SMALL = ("full", "snapkv:budget=128,slack=64", "streamingllm:recent=124", "quest:budget=128")
EVENTS = ("jaxpr_to_mlir_module_duration", "backend_compile_duration")  # a lowering, a compilation


class Stream(NamedTuple):
    """One answer. times: seconds from submit at which each token came."""

    ids: list[int]
    times: list[float]


class Asked:
    """A request under way; `wait` returns its tokens and when each came."""

    def __init__(self, engine: sejax.Engine, ids: Sequence[int], tokens: int):
        self._inbox: queue.SimpleQueue[tuple[float, Delta]] = queue.SimpleQueue()
        self._began = time.perf_counter()
        sampling = sejax.Sampling(max_tokens=tokens, ignore_eos=True)
        engine.submit(sejax.Prompt(tuple(map(int, ids))), sampling, lambda delta: self._inbox.put((time.perf_counter(), delta)))

    def wait(self) -> Stream:
        found = Stream([], [])
        while True:
            at, delta = self._inbox.get()
            found.ids.extend(delta.ids)
            found.times.extend([at - self._began] * len(delta.ids))
            if delta.finish == "error":
                raise RuntimeError(delta.error)
            if delta.finish:
                return found


def report(case: str, value: float, unit: str, target: float, ratio: float, met: bool, **more: Any) -> dict[str, Any]:
    """One result, printed and appended to bench/results/cpu.jsonl."""
    line = {"case": case, "value": value, "unit": unit, "target": target, "ratio": ratio, "met": met, **more}
    line = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in line.items()}
    load = round(os.getloadavg()[0], 1)
    line |= {"load": load, "cores": CORES, "jax": jax.__version__, "commit": commit(), "date": date.today().isoformat()}
    text = json.dumps(line)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "cpu.jsonl").open("a") as out:
        out.write(text + "\n")
    print(text, flush=True)
    return line


def prompt(model: sejax.Model, length: int, seed: int) -> np.ndarray:
    """Random ids, different for each seed: nothing can be reused."""
    return np.random.default_rng(seed).integers(3, model.config.vocab_size, length)


# ---- a decode step beside the bare one ----


def overhead(model: sejax.Model, spec: str, length: int = 512, steps: int = 64, rounds: int = 7) -> dict[str, Any]:
    """Batch 1: the engine's step against the functional decode and an arg-max, jitted with donation; rounds alternate."""
    method, max_len = sejax.method(spec), length + steps + 32
    bare = bare_step(model, method, prompt(model, length, 0), max_len)
    chunks = (32, 128, 512) if length >= 512 else (32,)
    with sejax.Engine(model, method, max_len=max_len, rows=1, slots=1, chunks=chunks, seed=0, progress=compiling()) as engine:
        pairs = []
        for number in range(rounds + 1):
            times = Asked(engine, prompt(model, length, number), steps).wait().times
            pairs.append((mean_step(times), mean_step(bare(steps))))
    pairs = pairs[1:]
    ratio = statistics.median(own / other for own, other in pairs)
    own, other = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    return report(f"overhead/{spec}", own, "ms", 1.10, ratio, ratio <= 1.10, bare_ms=other)


def mean_step(times: Sequence[float]) -> float:
    """Seconds a token; the first few, where the pipeline fills, are left out."""
    return (times[-1] - times[4]) / (len(times) - 5)


def bare_step(model: sejax.Model, method: sejax.Method, ids: np.ndarray, max_len: int) -> Callable[[int], list[float]]:
    """A function: steps -> times at which each token was ready, the host one step behind. Every call starts behind `ids`."""

    def greedy(model: sejax.Model, cache: sejax.Cache, token: jax.Array, slots: jax.Array) -> tuple[jax.Array, sejax.Cache]:
        logits, cache = sejax.decode(model, method, cache, token, slots)
        return jnp.argmax(logits, -1).astype(jnp.int32), cache

    step = jax.jit(greedy, donate_argnums=1)
    first, cache = sejax.prefill(model, method, sejax.init(model, method, 1, max_len), jnp.asarray(ids, jnp.int32))
    session, slots = sejax.take(cache, 0), jnp.zeros(1, jnp.int32)
    state = [cache]

    def run(steps: int) -> list[float]:
        cache = sejax.put(state.pop(), 0, session)
        token, times = jnp.argmax(first).astype(jnp.int32)[None], []
        for _ in range(steps):
            after, cache = step(model, cache, token, slots)
            token.block_until_ready()
            token = after
            times.append(time.perf_counter())
        jax.block_until_ready(token)
        state.append(cache)
        return times

    run(2)
    return run


# ---- many streams at once ----


def concurrency(model: sejax.Model, spec: str, streams: int = 8, length: int = 64, tokens: int = 128, rounds: int = 3) -> dict[str, Any]:
    """All streams at once against the same number one after another, each with a prompt of its own."""
    gains, together, apart = [], [], []
    with sejax.Engine(model, sejax.method(spec), max_len=1024, rows=streams, seed=0, progress=compiling()) as engine:
        Asked(engine, prompt(model, length, 0), 4).wait()
        for number in range(rounds):
            one, all_ = ([prompt(model, length, 1 + 2 * streams * number + i + at) for i in range(streams)] for at in (0, streams))
            began = time.perf_counter()
            for ids in one:
                Asked(engine, ids, tokens).wait()
            middle = time.perf_counter()
            for asked in [Asked(engine, ids, tokens) for ids in all_]:
                asked.wait()
            apart.append(middle - began)
            together.append(time.perf_counter() - middle)
            gains.append(apart[-1] / together[-1])
    ratio, seconds = statistics.median(gains), statistics.median(together)
    more = dict(apart_s=statistics.median(apart), tokens_per_s=streams * tokens / seconds, aim=3.5)
    return report(f"concurrency/{spec}", seconds, "s", 2.5, ratio, ratio >= 2.5, **more)


# ---- nothing compiles ----


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Lowerings and compilations in this process while the block runs."""
    counts = dict.fromkeys(EVENTS, 0)

    def listen(event: str, duration: float, **_: Any) -> None:
        name = event.rsplit("/", 1)[-1]
        if name in counts:
            counts[name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def compiles(model: sejax.Model, spec: str, turns: int = 10, chunks: Sequence[int] = (32, 128, 512)) -> dict[str, Any]:
    """A conversation whose turns and answers differ in length, beside a second, short stream in every other turn."""
    lengths, answers = (300, 5, 33, 128, 1, 200, 64, 31, 2, 90), (20, 1, 40, 3, 64, 7, 30, 2, 15, 9)
    longest = sum(lengths[:turns]) + sum(answers[:turns]) + 64
    with sejax.Engine(model, sejax.method(spec), max_len=longest, rows=2, chunks=chunks, seed=0, progress=compiling()) as engine:
        before, history = engine.stats().compiles, []
        with counted() as counts:
            for turn in range(turns):
                history += prompt(model, lengths[turn], turn).tolist()
                asked = [Asked(engine, history, answers[turn])]
                if turn % 2:
                    asked.append(Asked(engine, prompt(model, 10 + 7 * turn, 100 + turn), 5 + turn))
                history += asked[0].wait().ids
                for other in asked[1:]:
                    other.wait()
        own = engine.stats().compiles - before
    lowered, compiled = (counts[event] for event in EVENTS)
    total = lowered + compiled + own
    return report(f"compiles/{spec}", total, "events", 0, total, total == 0, lowered=lowered, compiled=compiled, engine=own, warm=before)


# ---- the next turn's first token ----


def ttft(model: sejax.Model, spec: str, history: int = 6144, new: int = 30, rounds: int = 5, max_len: int = 8192) -> dict[str, Any]:
    """Submit to first token: a cold history, then turns of `new` tokens on it."""
    chunks = [chunk for chunk in (32, 128, 512) if chunk <= history]
    with sejax.Engine(model, sejax.method(spec), max_len=max_len, rows=1, slots=1, chunks=chunks, seed=0, progress=compiling()) as engine:
        ids = prompt(model, history, 0).tolist()
        found, later = Asked(engine, ids, 4).wait(), []
        cold = found.times[0]
        for number in range(rounds):
            ids += [*found.ids, *prompt(model, new, 1 + number).tolist()]
            cached = engine.stats().cached_tokens
            found = Asked(engine, ids, 4).wait()
            if engine.stats().cached_tokens - cached < history:
                raise RuntimeError(f"{spec}: turn {number + 2} did not reuse the history")
            later.append(found.times[0])
    value = statistics.median(later)
    return report(f"ttft/{spec}", value, "s", 1 / 30, value / cold, value <= cold / 30, cold_s=cold, history=history, new=new)


CASES: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[str]]] = {
    "overhead": (overhead, ("full", "snapkv:budget=256,slack=256")),
    "concurrency": (concurrency, ("full",)),
    "compiles": (compiles, SMALL),
    "ttft": (ttft, ALL),
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] not in CASES:
        print(f"usage: python -m bench.engine {'|'.join(CASES)} [METHOD ...]", file=sys.stderr)
        return 2
    pinned = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, pinned)  # before the backend starts its threads
    keep_programs()
    case, specs = CASES[arguments[0]]
    model = sejax.load(MODEL)
    met = [case(model, spec)["met"] for spec in arguments[1:] or specs]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
