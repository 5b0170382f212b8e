"""A method that replays its first prompt and packs what it keeps: units between decode steps, pages that come back, nothing compiled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from jax import monitoring

import sejax
from sejax.serve import core as core_module
from sejax.serve import runs
from sejax.serve.engine import Engine, collect
from sejax.serve.request import Sampling
from tests.serve.test_engine import MODEL, RNG, accounted, ask, greedy, settled

SPEC = "kvzip:ratio=0.2,sinks=2,chunk=24,tail=3,instruction_ids=(5,6,-1,7,-1,8),turn_ids=(200,201),page=4"
LONG = RNG.integers(0, 256, 60).tolist()
ANSWER = Sampling(max_tokens=6, ignore_eos=True)


BOTH = pytest.param(SPEC + " + quest:budget=16,page=4,dense_layers=0", id="with_quest", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[pytest.param(SPEC, id="alone"), BOTH])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(MODEL, sejax.method(request.param), max_len=160, rows=3, slots=4, kv_tokens=320, chunks=(8, 32), seed=1) as engine:
        yield engine


def owned(engine: Engine) -> list[int]:
    """Pages of each session, oldest first."""
    return [len(s.pages) for _, s in sorted(engine._core.sessions.items())]  # type: ignore[union-attr]


def test_two_turns_beside_each_other_equal_the_functional_api(engine: Engine) -> None:
    tail, seen = RNG.integers(0, 256, 9).tolist(), []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if "compil" in event:
            seen.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    turns = [9, 200, 201, *LONG[:20], 200, 201, *LONG[20:30]]
    prompts = [LONG, LONG[:9], [3], turns]
    first = engine.generate(prompts, ANSWER)
    again = engine.generate([p + list(r.ids) + tail for p, r in zip(prompts, first, strict=True)], ANSWER)
    monitoring.unregister_event_duration_listener(listen)
    assert not seen
    for prompt, one, two in zip(prompts, first, again, strict=True):
        assert [list(one.ids), list(two.ids)] == greedy(engine.method, [(prompt, 6), (tail, 6)])
        assert two.usage.cached == len(prompt) + 5
    kept = first[-1].usage.kept - 5
    assert 15 < kept < 15 + 20 * 0.3  # what stands outside the two turns, and a fifth of what stands between
    assert settled(engine)
    accounted(engine)


def test_a_packed_prompt_gives_back_its_pages(engine: Engine) -> None:
    core = engine._core
    assert core is not None
    result = engine.generate([LONG], ANSWER)[0]
    assert settled(engine)
    session = max(core.sessions.values(), key=lambda s: s.key)
    counts = [np.asarray(state.rows["n"])[session.slot] for state in core.device.states]
    packed = max(-(-sum(-(-int(n - 5) // 4) for n in count) // 2) for count in counts)  # 5 decoded tokens are stored
    assert session.packed == (60, packed) and packed < 15 / 2
    assert packed <= len(session.pages) < 15 and not any(np.any(state.rows["dropped"]) for state in core.device.states)
    assert result.usage.kept == pytest.approx(np.mean(counts))
    follow = engine.generate([LONG + list(result.ids) + LONG], ANSWER)[0]  # the run grows again, beside others
    assert follow.usage.cached == 65 and settled(engine)
    assert len(session.pages) >= packed + -(-71 // 4)
    accounted(engine)


def test_replays_are_units_between_decode_steps(engine: Engine) -> None:
    core = engine._core
    assert core is not None
    _, inbox = ask(engine, LONG[:5], max_tokens=90)
    for _ in range(3):
        inbox.get(timeout=60)
    before, original = [], core.device.programs.__class__.__call__

    def watch(programs: object, name: str, *arguments: object, **more: object) -> object:
        before.append(name)
        return original(programs, name, *arguments, **more)  # type: ignore[arg-type]

    core.pace.patience = lambda rows: 0.0  # type: ignore[method-assign]
    core.device.programs.__class__.__call__ = watch  # type: ignore[method-assign]
    try:
        engine.generate([LONG], ANSWER)
    finally:
        core.device.programs.__class__.__call__ = original  # type: ignore[method-assign]
        del core.pace.patience
    first, last = before.index("replay"), len(before) - before[::-1].index("replay")
    assert before.count("replay") == 2 * 3 and before.count("pass") == 3  # 58 tokens in chunks of 24, two layers
    assert "decode" in before[first:last]
    collect(inbox.get)


def test_prompts_fit_because_others_were_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the pool holds one prompt while it is whole; packed, three of them live and grow in all of it."""
    monkeypatch.setattr(core_module, "RESERVE", 4)
    monkeypatch.setattr(runs, "GRANT", 1)
    prompts = [RNG.integers(0, 256, 60).tolist() for _ in range(3)]
    with Engine(MODEL, sejax.method(SPEC), max_len=80, rows=3, slots=4, kv_tokens=120, chunks=(8, 32), seed=1) as engine:
        inboxes = [ask(engine, p, max_tokens=16)[1] for p in prompts]
        for prompt, inbox in zip(prompts, inboxes, strict=True):
            result = collect(inbox.get)
            assert result.finish == "length" and list(result.ids) == greedy(engine.method, [(prompt, 16)])[0]
        assert settled(engine)
        assert engine.stats().parked == 3 and sum(owned(engine)) <= 30 < 3 * 15
        accounted(engine)


def test_trims_give_back_the_pages_of_what_they_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that grows token by token and is cut back every few of them stays as small as what is kept."""
    monkeypatch.setattr(runs, "GRANT", 1)
    spec = "skipkv:budget=13,sinks=2,window=4,near=6,segment=2,shortest=2,longest=12,delimiters=(3,9,14,22),period=4,page=4"
    with Engine(MODEL, sejax.method(spec), max_len=160, rows=2, slots=3, kv_tokens=200, chunks=(8, 32), seed=1) as engine:
        inboxes = [ask(engine, prompt, max_tokens=80)[1] for prompt in (LONG, LONG[:20])]
        for prompt, inbox in zip((LONG, LONG[:20]), inboxes, strict=True):
            result = collect(inbox.get)
            assert list(result.ids) == greedy(engine.method, [(prompt, 80)])[0]
        assert settled(engine)
        most = max(owned(engine))
        assert most <= -(-(13 + 2 * 4 + 2) // 4), f"{most} pages for at most 17 rows"
        accounted(engine)


def test_a_cancel_in_a_replay_frees_everything(engine: Engine) -> None:
    core = engine._core
    assert core is not None
    for _ in range(3):
        id, inbox = ask(engine, LONG, max_tokens=20)
        engine.cancel(id)
        assert collect(inbox.get).finish in ("cancelled", "length")
    assert settled(engine)
    accounted(engine)
    assert list(engine.generate([LONG], ANSWER)[0].ids) == greedy(engine.method, [(LONG, 6)])[0]
