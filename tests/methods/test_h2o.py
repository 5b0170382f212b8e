"""H2O: the vectors, period 2, a second turn."""

import numpy as np
import pytest

from sejax.cache.method import composed
from sejax.cache.retention import Retention
from sejax.cache.storage import raw
from sejax.methods import h2o as factory
from sejax.methods.h2o import score
from tests.methods.handmade import Sequence, vectors
from tests.oracles.h2o import Oracle
from tests.oracles.transformer import New

CASES = vectors("h2o")


def sequence_of(spec, inputs, repeat=False):
    q, k = inputs["q"], inputs["k"]
    v = inputs.get("v", k)
    if repeat:
        k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    return Sequence(spec, len(k), len(q) // len(k), k.shape[-1], 16), q, k, v


def follow(sequence, q, k, v, steps, first):
    for step in steps:
        t = step["after_token"]
        out = sequence.prompt(q[:, : t + 1], k[:, : t + 1], v[:, : t + 1]) if t < first else sequence.token(q[:, t], k[:, t], v[:, t])
        if "out" in step:
            np.testing.assert_allclose(out, step["out"], atol=1e-5)
        assert sequence.kept == np.asarray(step["kept"]).tolist()
        np.testing.assert_allclose(sequence.leaf("score"), step["score"], atol=1e-5)


@pytest.mark.parametrize("name", ["mha_prefill6_decode2", "gqa_group_mean", "budget_ge_T", "ties_zero_queries"])
def test_steps(name):
    """Period 1 is the paper: scores, sets and outputs after the prompt and each token."""
    case = CASES[name]
    heavy, recent = case["params"]["hh_size"], case["params"]["recent"]
    sequence, q, k, v = sequence_of(f"h2o:budget={heavy + recent},recent={recent},period=1,page=2", case["inputs"])
    follow(sequence, q, k, v, case["expected"]["steps"], case["params"]["prefill"])


def test_group_max():
    """Not ours (the mean is linear), but the same parts make it: the maximum over the group of what a call adds."""
    case = CASES["gqa_group_max"]
    rule = Retention(4, 1, 0, lambda c: score(c, 2, False), received=lambda mass: mass.max(axis=2))
    sequence, q, k, v = sequence_of(composed("made_up", {}, raw(2), lambda spec: rule), case["inputs"])
    follow(sequence, q, k, v, case["expected"]["steps"], case["params"]["prefill"])


def test_kvpress_observed_attention():
    case = CASES["kvpress_observed_attention"]
    sequence, q, k, v = sequence_of("h2o:budget=3,recent=0,normalise=true,page=2", case["inputs"])
    sequence.prompt(q, k, v)
    assert sequence.kept == case["expected"]["kept"].tolist()
    whole, q, k, v = sequence_of("h2o:budget=8,page=2", case["inputs"])
    whole.prompt(q, k, v)
    np.testing.assert_allclose(np.asarray(whole.leaf("score")) / (6 - np.arange(6)), case["expected"]["score"], atol=1e-5)


@pytest.mark.parametrize(("repeat", "field"), [(True, "kept_per_query_head"), (False, "kept_kv_head_mean")])
def test_kvcache_factory(repeat, field):
    """Prefill only: the best of the columns before the window, and the window."""
    case = CASES["kvcache_factory_prefill_only"]
    sequence, q, k, v = sequence_of("h2o:budget=5,recent=2,page=2", case["inputs"], repeat)
    sequence.prompt(q, k, v)
    assert sequence.kept == np.asarray(case["expected"][field]).tolist()
    if repeat:
        whole, *_ = sequence_of("h2o:budget=9,page=2", case["inputs"], repeat)
        whole.prompt(q, k, v)
        np.testing.assert_allclose(np.asarray(whole.leaf("score"))[:, :6], np.asarray(case["expected"]["column_sums"])[:, :6], atol=1e-5)


def test_period_2_and_a_second_turn():
    """Scores go on through trims and turns: against the oracle."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((4 if n == "q" else 2, 24, 4)) for n in "qkv")
    sequence = Sequence("h2o:budget=6,recent=2,period=2,page=2", 2, 2, 4, 32)
    oracle = Oracle(0, 1, 2, **dict(sequence.method.arguments))
    start = 0
    for count in (9, 1, 1, 1, 7, 1, 1, 1):
        at = slice(start, start + count)
        fold = np.moveaxis(q[:, at].reshape(2, 2, count, 4), 2, 0)
        new = New(fold, k[:, at].swapaxes(0, 1), v[:, at].swapaxes(0, 1), fold, k[:, at].swapaxes(0, 1), np.arange(24)[at])
        if count > 1:
            sequence.prompt(q[:, at], k[:, at], v[:, at])
            oracle.prompt(new)
        else:
            sequence.token(q[:, start], k[:, start], v[:, start])
            oracle.token(new)
        start += count
        assert sequence.kept == oracle.kept
        expected = [[oracle.received[h][p] for p in held] for h, held in enumerate(oracle.kept)]
        np.testing.assert_allclose(sequence.leaf("score"), expected, atol=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match="budget=4 must be larger than recent=4"):
        factory(budget=4, recent=4)
    with pytest.raises(ValueError, match="period=-1"):
        factory(period=-1)
    with pytest.raises(ValueError, match="prefill_budget=10 is smaller than budget=12"):
        factory(budget=12, prefill_budget=10)
    with pytest.raises(ValueError, match="prefill_budget=64 goes with a budget"):
        factory(ratio=0.5, prefill_budget=64)
