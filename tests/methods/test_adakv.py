"""Ada-KV: the vectors, random scores against the oracle's formula, head pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax.cache.retention import Candidates, best
from sejax.methods import adakv as factory
from sejax.methods.adakv import normalised, safeguarded, score, shares, winners
from tests.methods.handmade import Sequence, vectors, window_mass
from tests.oracles.adakv import counts

CASES = vectors("adakv")
ATTENTION = [name for name in CASES if name.startswith("official")]


def sets(found, total, quota):
    most = int(quota.max())
    return [[p for p in row if p >= 0] for row in np.asarray(best(found, total, quota, most, most))[0].tolist()]


@pytest.mark.parametrize("name", ATTENTION)
def test_scores_counts_and_sets(name):
    """`official_no_gqa` keeps a set per query head: keys repeated, a group of one."""
    params, inputs, expected = (CASES[name][n] for n in ("params", "inputs", "expected"))
    q, k, window, base = inputs["q"], inputs["k"], params["window"], params["base"]
    k = np.repeat(k, len(q) // len(k), axis=0) if "no_gqa" in name else k
    total, observed = jnp.full((1, len(k)), k.shape[1], jnp.int32), jnp.asarray([window])
    found = score(Candidates(total, window_mass(q, k, window), observed), params["kernel"], "max")
    before = found[:, :, : k.shape[1] - window]
    np.testing.assert_allclose(before[0], expected["score"], atol=1e-5)
    weighted = normalised(before, base) if params["normalize"] else before
    if "score_normalized" in expected:
        np.testing.assert_allclose(weighted[0], expected["score_normalized"], atol=1e-5)
    np.testing.assert_array_equal(winners(weighted, base)[0], expected["count_in_global_topk"])
    safe = int(base * params["floor_alpha"])
    quota = shares(found, total, observed, base, safe, params["floor_alpha"], params["normalize"])
    np.testing.assert_array_equal(quota[0] - window, expected["head_capacity_without_window"])
    np.testing.assert_array_equal(quota[0], expected["head_lens"])
    assert sets(found, total, quota) == [[int(p) for p in row] for row in expected["kept"]]


@pytest.mark.parametrize("name", ["hand_scores_two_heads", "half_rounding", "tie_in_global_topk", "kvpress_safeguard"])
def test_hand_made_scores(name):
    params, expected = CASES[name]["params"], CASES[name]["expected"]
    found = jnp.asarray(CASES[name]["inputs"]["score"], jnp.float32)[None]
    total, none = jnp.full(found.shape[:2], found.shape[2], jnp.int32), jnp.zeros(1, jnp.int32)
    if name == "kvpress_safeguard":
        mean = expected["n_kept_per_head_mean"]
        quota = safeguarded(found, total, mean, int(mean * params["alpha_safeguard"]))
    else:
        np.testing.assert_array_equal(winners(found, params["base"])[0], expected["count_in_global_topk"])
        base, floor = params["base"], params["floor_alpha"]
        quota = shares(found, total, none, base, int(base * floor), floor, False)
        np.testing.assert_array_equal(quota[0], expected["head_capacity_without_window"])
    assert sets(found, total, quota) == [[int(p) for p in row] for row in expected["kept"]]


def test_through_the_seal_and_head_pages():
    """The kept set of a vector, and every head on pages of its own with room for the slack."""
    case = CASES["official_gqa_mean_alpha0.2"]
    inputs, expected = case["inputs"], case["expected"]
    sequence = Sequence("adakv:budget=6,window=2,kernel=1,floor=0.2,slack=3,page=2", 2, 2, 2, 16)
    sequence.prompt(inputs["q"], inputs["k"], inputs["k"])
    assert sequence.kept == [[int(p) for p in row] for row in expected["kept"]]
    dealt = np.asarray(sequence.state.rows["dealt"][1])
    assert dealt.tolist() == [-(-(n + 3) // 2) for n in expected["head_lens"].tolist()]
    assert dealt.sum() <= 2 * sequence.table.shape[1]
    for _ in range(2):  # the slack's rows are there for each head, none is dropped
        sequence.token(*np.random.default_rng(0).standard_normal((3, 4, 2))[:1], *np.ones((2, 2, 2)))
    assert [len(held) for held in sequence.kept] == [n + 2 for n in expected["head_lens"].tolist()]
    assert not np.any(sequence.state.rows["dropped"])


def test_keep_all():
    case = CASES["base_gt_available_keep_all"]
    length, budget = case["params"]["T"], case["params"]["base_capacity_total"]
    sequence = Sequence(f"adakv:budget={budget},window=2,slack=3,page=2", 1, 1, 2, 16)
    sequence.prompt(*np.random.default_rng(0).standard_normal((3, 1, length, 2)))
    assert sequence.kept == [list(range(length))]


@pytest.mark.parametrize("fixed", [True, False])
def test_random_scores_equal_the_formula(fixed):
    """A base that is fixed, as of a budget, and one that the length tells, as of a ratio."""
    floor = 0.3
    safe = [int(n * floor) for n in range(20)]

    def both(s, total, window, base):
        at = (lambda n: safe[n]) if fixed else (lambda n: jnp.asarray(safe)[n])
        return shares(s, total, window, base, at(base), floor, False), safeguarded(s, total, base + 2, at(base + 2))

    run = jax.jit(both, static_argnums=3) if fixed else jax.jit(both)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(3, 20), min_size=3, max_size=3),
        st.booleans(),
        st.just(5) if fixed else st.integers(0, 15),
    )
    def check(seed, totals, ties, base):
        rng, window = np.random.default_rng(seed), 2
        found = rng.random((1, 3, 20)).astype(np.float32)
        found = np.round(found * 4) / 4 if ties else found
        for head, total in enumerate(totals):
            found[0, head, total - window : total] = np.inf
        given_base = base if fixed else np.asarray([[base]], np.int32)
        quota, kept = (np.asarray(x)[0] for x in run(found, np.asarray([totals], np.int32), np.asarray([window], np.int32), given_base))
        rows = [found[0, h, : total - window] for h, total in enumerate(totals)]
        cut = [min(round(c * (1 - floor) + int(base * floor)), len(r)) for c, r in zip(counts(rows, base), rows, strict=True)]
        assert quota.tolist() == [c + window for c in cut]
        full = [found[0, h, :total].copy() for h, total in enumerate(totals)]
        for row in full:
            row[np.argsort(-row, kind="stable")[: int((base + 2) * floor)]] = np.inf
        assert kept.tolist() == counts(full, base + 2)

    check()


def test_bad_arguments():
    with pytest.raises(ValueError, match="floor=2 must lie between 0 and 1"):
        factory(floor=2)
    with pytest.raises(ValueError, match="budget=32 must be larger than window=32"):
        factory(budget=32)
    assert factory() == factory(budget=2048)
