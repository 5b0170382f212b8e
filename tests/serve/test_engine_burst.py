"""Several decode steps as one program while nobody streams: the same answers, and single steps when somebody does."""

from __future__ import annotations

import queue
from collections import Counter
from typing import Any

import pytest

import sejax
from sejax.serve.engine import Engine, collect
from sejax.serve.programs import Programs
from sejax.serve.request import Delta, Prompt, Sampling
from tests.serve.test_engine import MODEL, PROMPTS, accounted, settled

SPECS = ["full", "h2o:budget=12,period=3,page=4", "snapkv:budget=24,window=4,slack=8"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each program ran."""
    found: Counter[str] = Counter()
    original = Programs.__call__

    def watch(programs: Programs, name: str, *arguments: Any, **more: Any) -> Any:
        found[name] += 1
        return original(programs, name, *arguments, **more)

    monkeypatch.setattr(Programs, "__call__", watch)
    return found


def engine(spec: str, burst: int) -> Engine:
    return Engine(MODEL, sejax.method(spec), max_len=96, rows=2, slots=3, chunks=(32,), burst=burst, seed=1)


def answers(spec: str, burst: int, ran: Counter[str]) -> list[tuple[int, ...]]:
    ran.clear()
    with engine(spec, burst) as it:
        whole = it.generate(PROMPTS[:2], Sampling(max_tokens=27, ignore_eos=True, temperature=0))
        stop = whole[0].ids[13]  # a stop id in the middle of a burst
        stopped = it.generate(PROMPTS[:2], Sampling(max_tokens=27, ignore_eos=True, temperature=0, stop_ids=(stop,)))
        again = it.generate([[*PROMPTS[0], *whole[0].ids, 5, 6]], Sampling(max_tokens=9, ignore_eos=True, temperature=0))
        sampled = it.generate(PROMPTS[:1], Sampling(max_tokens=10, ignore_eos=True, temperature=1.0, seed=3))
        assert settled(it) and all(r.finish == "length" for r in whole) and stopped[0].finish == "stop"
        assert stopped[0].ids == whole[0].ids[: whole[0].ids.index(stop) + 1] and again[0].usage.cached > 40
        accounted(it)
    return [r.ids for r in (*whole, *stopped, *again, *sampled)]


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_answers(spec: str, ran: Counter[str]) -> None:
    single = answers(spec, 1, ran)
    assert ran["decode"] > 60 and not ran["burst"]
    assert answers(spec, 4, ran) == single
    assert ran["burst"] >= 12 and ran["decode"] < 60


def test_a_stream_takes_single_steps(ran: Counter[str]) -> None:
    with engine("full", 4) as it:
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        it.submit(Prompt(tuple(PROMPTS[0])), Sampling(max_tokens=20, ignore_eos=True), inbox.put)
        assert len(collect(inbox.get).ids) == 20 and not ran["burst"] and ran["decode"] >= 19
