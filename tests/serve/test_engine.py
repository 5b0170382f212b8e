"""The real engine on a tiny random model: it must say what the functional API says, whatever runs beside it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sejax
from sejax.serve import core as core_module
from sejax.serve.engine import Engine, collect
from sejax.serve.request import Delta, InvalidRequest, Prompt, Sampling
from tests.models.tiny import tiny_model
from tests.serve.fake import FakeTokenizer

MODEL = tiny_model(vocab=271).replace(tokenizer=FakeTokenizer())
METHODS = ["full", "snapkv:budget=24,window=4,slack=8", "streamingllm:sinks=2,recent=14", "quest:budget=16,page=8,dense_layers=1"]
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 256, size).tolist() for size in (40, 9, 23, 1)]


@pytest.fixture(scope="module", params=METHODS)
def engine(request: Any) -> Iterator[Engine]:
    with Engine(MODEL, sejax.method(request.param), max_len=160, rows=4, slots=6, chunks=(8, 32), seed=1) as engine:
        yield engine


def greedy(method: Any, turns: list[tuple[list[int], int]]) -> list[list[int]]:
    """The functional API's answers to the turns of one session; a turn's first token is the last answer's last."""
    cache, answers, last = sejax.init(MODEL, method, 1, 160), [], []
    for ids, size in turns:
        tokens = np.zeros(64, np.int32)
        tokens[: len(last) + len(ids)] = last + ids
        logits, cache = sejax.prefill(MODEL, method, cache, tokens, 0, len(last) + len(ids), chunk=64)
        answer = [int(jnp.argmax(logits))]
        while len(answer) < size:
            logits, cache = sejax.decode(MODEL, method, cache, [answer[-1]], [0])
            answer.append(int(jnp.argmax(logits[0])))
        answers.append(answer)
        last = answer[-1:]
    return answers


def ask(engine: Engine, prompt: list[int], **sampling: Any) -> tuple[int, queue.SimpleQueue[Delta]]:
    inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    return engine.submit(Prompt(tuple(prompt)), Sampling(**{"ignore_eos": True, **sampling}), inbox.put), inbox


def settled(engine: Engine) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end and engine._core.busy:  # type: ignore[union-attr]
        time.sleep(0.005)
    return not engine._core.busy  # type: ignore[union-attr]


def accounted(engine: Engine) -> None:
    """Every slot and page has exactly one owner."""
    core = engine._core
    assert core is not None
    slots = [s.slot for s in core.sessions.values()]
    assert sorted([*core.free, *slots]) == list(range(core.device.sizes.slots))
    pages = [p for s in core.sessions.values() for p in s.pages]
    assert sorted([*core.runs._free, *pages]) == list(range(core.runs.total))
    assert not core.prefilling and not core.running and set(core.sessions) == set(core.parked)


def test_answers_equal_the_functional_api_over_two_turns(engine: Engine) -> None:
    size, tail = 12, RNG.integers(0, 256, 9).tolist()
    first = engine.generate(PROMPTS, Sampling(max_tokens=size, ignore_eos=True))
    second = engine.generate(
        [p + list(r.ids) + tail for p, r in zip(PROMPTS, first, strict=True)], Sampling(max_tokens=size, ignore_eos=True)
    )
    for prompt, one, two in zip(PROMPTS, first, second, strict=True):
        assert [list(one.ids), list(two.ids)] == greedy(engine.method, [(prompt, size), (tail, size)])
        assert one.finish == two.finish == "length"
        assert two.usage.cached == len(prompt) + size - 1
        assert two.usage.prompt == len(prompt) + size + 9
    assert settled(engine)
    accounted(engine)


def test_a_seed_reproduces_a_sampled_answer_beside_other_rows(engine: Engine) -> None:
    sampling = Sampling(max_tokens=10, temperature=1.5, top_p=0.9, top_k=50, seed=5, ignore_eos=True)
    alone = engine.generate([PROMPTS[0]], sampling)[0]
    _, other = ask(engine, PROMPTS[2], max_tokens=30, temperature=2.0)
    again = engine.generate([PROMPTS[0]], sampling)[0]
    assert again.ids == alone.ids
    assert len(collect(other.get).ids) == 30
    assert engine.generate([PROMPTS[0]], Sampling(max_tokens=10, temperature=1.5, seed=6, ignore_eos=True))[0].ids != alone.ids


def test_stop_ids_and_strings_end_an_answer(engine: Engine) -> None:
    tokenizer, prompt = FakeTokenizer(), PROMPTS[1]
    forced = tuple(tokenizer.encode("xABDEF<|im_end|>more"))
    result = engine.generate([prompt], Sampling(max_tokens=20, force_tokens=forced))[0]
    assert (result.text, result.finish, result.usage.completion) == ("xABDEF", "stop", 4)
    result = engine.generate([prompt], Sampling(max_tokens=20, force_tokens=forced, stop=("BDE",)))[0]
    assert (result.text, result.finish) == ("xA", "stop")
    result = engine.generate([prompt], Sampling(max_tokens=2, force_tokens=forced))[0]
    assert (result.text, result.finish) == ("xAB", "length")
    assert settled(engine)
    accounted(engine)


def test_a_session_goes_on_exactly_after_a_stop_string(engine: Engine) -> None:
    """What the device computed past the stop must not be seen by the next turn."""
    prompt, tokenizer = PROMPTS[2], FakeTokenizer()
    forced = tuple(tokenizer.encode("xABDEF"))
    engine.generate([prompt], Sampling(max_tokens=20, force_tokens=forced, stop=("AB",), ignore_eos=True))
    follow = prompt + tokenizer.encode("x") + [5, 6, 7]
    result = engine.generate([follow], Sampling(max_tokens=8, ignore_eos=True))[0]
    assert result.usage.cached == len(prompt) + 1
    cache = sejax.init(MODEL, engine.method, 1, 160)
    _, cache = sejax.prefill(MODEL, engine.method, cache, np.array(prompt), 0)
    _, cache = sejax.decode(MODEL, engine.method, cache, follow[len(prompt) : len(prompt) + 1], [0])
    logits, cache = sejax.prefill(MODEL, engine.method, cache, np.array(follow[-3:]), 0)
    assert result.ids[0] == int(jnp.argmax(logits))


@pytest.mark.parametrize("moment", ["queued", "prefilling", "running"])
def test_cancel_frees_everything(engine: Engine, moment: str) -> None:
    ids = [ask(engine, RNG.integers(0, 256, 60).tolist(), max_tokens=90) for _ in range(6)]
    if moment == "running":
        for _, inbox in ids[:4]:
            inbox.get(timeout=10)
    elif moment == "prefilling":
        ids[0][1].get(timeout=10)
    for id, _ in ids:
        engine.cancel(id)
        engine.cancel(id)
    assert {collect(inbox.get).finish for _, inbox in ids} <= {"cancelled", "length"}
    assert settled(engine)
    accounted(engine)
    prompt = PROMPTS[0]
    assert list(engine.generate([prompt], Sampling(max_tokens=6, ignore_eos=True))[0].ids) == greedy(engine.method, [(prompt, 6)])[0]


def test_nothing_compiles_after_the_start(engine: Engine) -> None:
    from jax import monitoring

    seen: list[str] = []
    monitoring.register_event_duration_secs_listener(lambda name, *_, **__: seen.append(name) if "compil" in name else None)
    text: list[int] = []
    for turn in range(5):
        text += RNG.integers(0, 256, 3 + 5 * turn).tolist()
        text += engine.generate([text], Sampling(max_tokens=2 + turn, ignore_eos=True))[0].ids
    assert not seen
    assert engine.stats().compiles == len(engine._core.device.programs._run)  # type: ignore[union-attr]


def test_requests_that_can_never_be_served(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="maximum context length is 160 tokens. However, you requested 161 tokens") as caught:
        ask(engine, [1] * 151, max_tokens=10)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="maximum context length"):
        ask(engine, [1] * 160)
    with pytest.raises(InvalidRequest, match="empty"):
        ask(engine, [])
    with pytest.raises(InvalidRequest, match="outside 0..270"):
        ask(engine, [271])
    _, inbox = ask(engine, [1] * 159)
    assert len(collect(inbox.get).ids) == 1


def test_more_sessions_than_slots_lose_the_oldest_quietly(engine: Engine) -> None:
    prompts = [RNG.integers(0, 256, 20).tolist() for _ in range(9)]
    first = [engine.generate([p], Sampling(max_tokens=4, ignore_eos=True))[0] for p in prompts]
    again = engine.generate([prompts[0] + list(first[0].ids) + [3]], Sampling(max_tokens=4, ignore_eos=True))[0]
    kept = engine.generate([prompts[8] + list(first[8].ids) + [3]], Sampling(max_tokens=4, ignore_eos=True))[0]
    assert again.usage.cached == 0 and kept.usage.cached == 23
    assert settled(engine)
    accounted(engine)


def test_a_short_pool_pauses_the_youngest_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "RESERVE", 4)
    method = sejax.method("quest:budget=16,page=8,dense_layers=1")
    with Engine(MODEL, method, max_len=96, rows=3, slots=4, kv_tokens=112, chunks=(8, 32), seed=1) as engine:
        inboxes = [ask(engine, p, max_tokens=50)[1] for p in PROMPTS[:3]]
        results = [collect(inbox.get) for inbox in inboxes]
        assert engine.stats().preemptions > 0
        for prompt, result in zip(PROMPTS, results, strict=False):
            assert list(result.ids) == greedy(method, [(prompt, 50)])[0]
        assert settled(engine)
        accounted(engine)


def test_a_full_queue_says_so_and_a_broken_step_ends_every_request() -> None:
    engine = Engine(MODEL, sejax.method("full"), max_len=64, rows=1, slots=1, chunks=(8,), max_queue=2)
    engine.start()
    inboxes = [ask(engine, [1, 2, 3], max_tokens=60)[1] for _ in range(2)]
    with pytest.raises(InvalidRequest, match="queue is full") as caught:
        ask(engine, [1])
    assert caught.value.status == 429

    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    engine._core.device.decode = broken  # type: ignore[union-attr]
    results = [collect(inbox.get) for inbox in inboxes]
    assert [r.finish for r in results] == ["error", "error"] and "planted" in str(results[0].error)
    assert not engine.ready and "planted" in str(engine.failure)
    with pytest.raises(InvalidRequest, match="not serving") as caught:
        ask(engine, [1])
    assert caught.value.status == 503


def test_a_cancel_while_the_row_must_make_room_ends_too() -> None:
    """The step in flight gives no token then: the cancel must not wait for one."""
    with Engine(MODEL, sejax.method("h2o:budget=8,period=2,page=8"), max_len=160, rows=1, slots=2, chunks=(32,), seed=1) as engine:
        for tokens in range(40):  # whatever is in flight when the cancel comes
            id, inbox = ask(engine, PROMPTS[2], max_tokens=120)
            for _ in range(1 + tokens % 10):
                inbox.get(timeout=10)
            engine.cancel(id)
            while inbox.get(timeout=10).finish is None:
                pass
        assert settled(engine)
        accounted(engine)
