"""SnapKV: the vectors, and random cases against the oracle's formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax.cache.retention import Candidates, best
from sejax.methods import snapkv as snapkv_factory
from sejax.methods.snapkv import score
from tests.methods.handmade import Sequence, vectors, window_mass
from tests.oracles.snapkv import by_chunk, pooled
from tests.oracles.transformer import softmax

CASES = vectors("snapkv")
ATOL = 1e-5


def scored(case, pooling, kernel, heads="each", repeat=False, reduce=None, scale=1.0):
    """The method's own score and kept set for a case: f32[H,T], [[positions]]."""
    q, k, window = case["inputs"]["q"], case["inputs"]["k"], case["params"]["window"]
    if repeat:  # the official code repeats K to the query heads first: the same as a group of one
        k = np.repeat(k, len(q) // len(k), axis=0)
    seen = window_mass(q, k, window)
    if reduce == "max":  # the group's maximum as if it were one query head
        seen = seen.max(axis=2, keepdims=True)
    total = jnp.full((1, len(k)), k.shape[1], jnp.int32)
    found = score(Candidates(total, seen * scale, jnp.asarray([window])), 0, kernel, pooling, heads)
    return found, total


def sets(found, total, budget):
    return [sorted(row) for row in np.asarray(best(found, total, jnp.minimum(total, budget), budget, budget))[0].tolist()]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("official_per_query_head_maxpool", dict(pooling="max", kernel=3, repeat=True)),
        ("official_per_query_head_avgpool", dict(pooling="avg", kernel=3, repeat=True)),
        ("kv_head_mean_maxpool", dict(pooling="max", kernel=3)),
        ("kv_head_max_maxpool", dict(pooling="max", kernel=3, reduce="max")),
        ("no_pooling_kv_head_mean", dict(pooling="max", kernel=1)),
        ("ties_uniform_attention_avgpool", dict(pooling="avg", kernel=3)),
        ("capacity_eq_T_still_reorders", dict(pooling="max", kernel=1)),
    ],
)
def test_scores_and_sets(name, arguments):
    """At T == C the official code keeps all in another order; ours stores rows ascending, so only the set is compared."""
    case = CASES[name]
    found, total = scored(case, **arguments)
    expected = case["expected"].get("pooled_score", case["expected"].get("score"))
    before = found.shape[-1] - case["params"]["window"]
    if expected is not None:
        np.testing.assert_allclose(found[0, :, :before], expected, atol=ATOL)
    assert sets(found, total, case["params"]["capacity_total"]) == [sorted(map(int, row)) for row in case["expected"]["kept"]]


def test_kvpress():
    """kvpress takes the mean over the window (ours: the sum) and gives the window max + 1 (ours: inf); the sets are the same."""
    case = CASES["kvpress"]
    window = case["params"]["window"]
    found, total = scored(case, "avg", 3, scale=1 / window)
    np.testing.assert_allclose(found[0, :, :-window], np.asarray(case["expected"]["score"])[:, :-window], atol=ATOL)
    assert sets(found, total, case["params"]["n_kept"]) == case["expected"]["kept"].tolist()


def test_shared_across_heads():
    case = CASES["shared_across_heads_max"]
    found, total = scored(case, "max", 1, heads="shared")
    for head in range(2):
        np.testing.assert_allclose(found[0, head, :-2], case["expected"]["score"], atol=ATOL)
    assert sets(found, total, 5) == [case["expected"]["kept"].tolist()] * 2


@pytest.mark.parametrize(("name", "budget"), [("kv_head_mean_maxpool", 5), ("capacity_gt_T_keep_all", 9)])
def test_through_the_seal(name, budget):
    """The whole path: stage, seal, and what the run then holds."""
    case = CASES[name]
    inputs = case["inputs"]
    sequence = Sequence(f"snapkv:budget={budget},window=2,kernel=3,slack=2,page=2", 2, 2, 2, 16)
    sequence.prompt(inputs["q"], inputs["k"], inputs["v"])
    everything = [list(range(8))] * 2
    assert sequence.kept == (everything if "kept_all" in case["expected"] else case["expected"]["kept"].tolist())


WIDTH, HEADS, GROUP = 24, 2, 3


def test_chunks_have_the_mean_of_their_candidates():
    run = jax.jit(lambda seen, total, window: score(Candidates(total, seen, window), 0, 1, "max", "each", 4))

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, WIDTH), st.integers(1, 6))
    def check(seed, total, window):
        seen, window = np.random.default_rng(seed).random((1, HEADS, GROUP, WIDTH)).astype(np.float32), min(window, total)
        found = np.asarray(run(seen, np.full((1, HEADS), total, np.int32), np.asarray([window], np.int32)))[0]
        for head in range(HEADS):
            before = seen[0, head].mean(0)[: total - window]
            np.testing.assert_allclose(found[head, : total - window], by_chunk(before, 4), rtol=1e-5)
            assert np.all(found[head, total - window : total] == np.inf)

    check()


def test_whole_chunks_stay():
    rng = np.random.default_rng(0)
    sequence = Sequence("snapkv:budget=18,window=2,chunk=4,slack=2,page=4", 2, 2, 4, 64)
    sequence.prompt(*(2 * rng.standard_normal((n, 50, 4)) for n in (4, 2, 2)))
    for held in sequence.kept:
        assert held[-2:] == [48, 49]
        assert {p // 4 for p in held[:-2]} == {p // 4 for p in held[:-2:4]} and [p % 4 for p in held[:-2]] == [0, 1, 2, 3] * 4
    assert sequence.kept[0] != sequence.kept[1]


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("heads", ["each", "shared"])
def test_random_cases_equal_the_formula(pooling, heads):
    run = jax.jit(lambda seen, total, window: score(Candidates(total, seen, window), 2, 3, pooling, heads))

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, WIDTH), st.integers(1, 6), st.booleans())
    def check(seed, total, window, ties):
        rng = np.random.default_rng(seed)
        window = min(window, total)
        seen = rng.random((1, HEADS, GROUP, WIDTH)).astype(np.float32)
        seen = np.round(seen * 3) / 4 if ties else seen  # few values: many equal scores
        seen[..., total:] = 9  # what is not a candidate must not matter
        found = np.asarray(run(seen, np.full((1, HEADS), total, np.int32), np.asarray([window], np.int32)))[0]
        kept = sets(found[None], jnp.full((1, HEADS), total), 7)
        for head in range(HEADS):
            group = seen[0].max((0, 1)) if heads == "shared" else seen[0, head].mean(0, dtype=np.float32)
            before = pooled(group[: total - window], 3, pooling)
            np.testing.assert_allclose(found[head, 2 : total - window], before[2:], rtol=1e-6)
            full = np.full(total, np.inf)
            full[2 : total - window] = found[head, 2 : total - window]
            expected = sorted(np.argsort(-full, kind="stable")[:7].tolist())
            assert [p for p in kept[head] if p >= 0] == expected

    check()


def test_softmax_of_the_vectors_is_the_kernels():
    """The window attention that the scores start from, in numpy."""
    case = CASES["no_pooling_kv_head_mean"]
    q, k = case["inputs"]["q"], case["inputs"]["k"]
    logits = np.einsum("hgtd,hcd->hgtc", q.reshape(2, 2, 8, 2)[:, :, 6:], k) / np.sqrt(2)
    logits = np.where(np.arange(8) <= np.arange(6, 8)[:, None], logits, -np.inf)
    np.testing.assert_allclose(window_mass(q, k, 2)[0], softmax(logits).sum(2), atol=ATOL)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(budget=32, window=32), "budget=32 leaves nothing beside window=32"),
        (dict(kernel=4), "kernel=4 must be odd"),
        (dict(chunk=0), "chunk=0 must be at least 1"),
        (dict(budget=1000, chunk=16), "budget=1000 minus window=32, and sinks=0, must be multiples of chunk=16"),
        (dict(window=0), "window=0"),
        (dict(slack=0), "slack=0"),
        (dict(pooling="sum"), "pooling='sum'"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        snapkv_factory(**arguments)
