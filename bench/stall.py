"""What a 128K prompt does to eight streams that decode meanwhile, and they to it, on a GPU: `python -m bench.stall`.

Random bf16 weights of Qwen3-8B's shape through the whole engine. Two numbers: the 99th percentile of the streams' time between
tokens while the prompt prefills, over their undisturbed median; the prompt's time to its first token, over the same alone.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import time

import numpy as np

import sejax
from bench.step import random_model
from bench.timing import record
from sejax.serve.request import Delta, Prompt

STREAMS, HELD, LONG, CALM = 8, 8192, 131072, 200


def first_token(engine: sejax.Engine, ids: tuple[int, ...]) -> float:
    """Seconds to the first token of a prompt."""
    inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    began = time.perf_counter()
    engine.submit(Prompt(ids), sejax.Sampling(temperature=0, max_tokens=1, ignore_eos=True), inbox.put)
    while not (delta := inbox.get()).ids:
        assert delta.finish is None, delta
    return time.perf_counter() - began


def main() -> None:
    model = random_model("8b")
    order = np.random.default_rng(0)

    def prompt(size: int) -> tuple[int, ...]:
        return tuple(order.integers(0, 150000, size).tolist())

    room = STREAMS * (HELD + 4096) + LONG + 1024
    sizes = {"max_len": LONG + 512, "rows": STREAMS + 1, "slots": STREAMS + 1, "kv_tokens": room, "chunks": (256, 1024)}
    engine = sejax.Engine(model, sejax.method("full"), **sizes)
    with engine:
        alone = min(first_token(engine, prompt(LONG)) for _ in range(2))
        stamps: list[list[float]] = [[] for _ in range(STREAMS)]

        def sink(times: list[float]):
            return lambda delta: times.append(time.perf_counter()) if delta.ids else None

        sampling = sejax.Sampling(temperature=0, max_tokens=4000, ignore_eos=True)
        asked = [engine.submit(Prompt(prompt(HELD)), sampling, sink(times)) for times in stamps]
        while min(len(times) for times in stamps) < CALM:
            time.sleep(0.01)
        calm = [times[len(times) - CALM // 2 :] for times in stamps]  # all prompts were done when the last stream began
        begin = [len(times) for times in stamps]
        among = first_token(engine, prompt(LONG))
        end = [len(times) for times in stamps]
        for id in asked:
            engine.cancel(id)
    before = [b - a for times in calm for a, b in itertools.pairwise(times)]
    during = [b - a for times, i, j in zip(stamps, begin, end, strict=True) for a, b in itertools.pairwise(times[i:j])]
    median, worst = statistics.median(before), statistics.quantiles(during, n=100)[98]
    record("step", "stall/128k_inter_token_p99", worst * 1e3, "ms", median * 1e3, worst / median)
    record("step", "stall/128k_first_token", among, "s", alone, among / alone)


if __name__ == "__main__":
    main()
