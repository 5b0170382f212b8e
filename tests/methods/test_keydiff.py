"""KeyDiff: the vectors, and random cases against the oracle's formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax.cache.retention import Candidates, best
from sejax.methods import keydiff as factory
from sejax.methods.keydiff import score, unlike
from tests.methods.handmade import Sequence, vectors
from tests.oracles.keydiff import by_block
from tests.oracles.keydiff import unlike as reference

CASES = vectors("keydiff")


def test_scores():
    case = CASES["whole_prompt"]
    keys = jnp.asarray(case["inputs"]["k"], jnp.float32)[None]
    np.testing.assert_allclose(unlike(keys, jnp.ones(keys.shape[:3], bool))[0], case["expected"]["score"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("whole_prompt", "keydiff:budget=4,slack=2,page=2"),
        ("block_press", "keydiff:budget=4,block=3,slack=2,page=2"),
        ("ratio_0_keep_all", "keydiff:budget=8,slack=2,page=2"),
    ],
)
def test_sets_through_the_seal(name, spec):
    k = CASES[name]["inputs"]["k"]
    sequence = Sequence(spec, 2, 1, 2, 16)
    sequence.prompt(k, k, k)
    everything = [list(range(8))] * 2
    assert sequence.kept == (everything if "kept_all" in CASES[name]["expected"] else CASES[name]["expected"]["kept"].tolist())


WIDTH, BUDGET = 20, 6


@pytest.mark.parametrize("block", [None, 1, 4])
def test_random_cases_equal_the_formula(block):
    def chosen(keys, total):
        found = score(Candidates(total, None, jnp.zeros(1, jnp.int32), read=lambda name: keys), BUDGET, block)
        return best(found, total, jnp.minimum(total, BUDGET), BUDGET, BUDGET)

    run = jax.jit(chosen)

    @settings(max_examples=70, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, WIDTH), st.integers(1, WIDTH))
    def check(seed, a, b):
        keys = np.random.default_rng(seed).standard_normal((1, 2, WIDTH, 4)).astype(np.float32)
        kept = np.asarray(run(keys, np.asarray([[a, b]], np.int32)))[0]
        for head, total in enumerate((a, b)):
            held = keys[0, head, :total].astype(np.float64)
            if block is None:
                expected = sorted(np.argsort(-reference(held), kind="stable")[:BUDGET].tolist())
            else:
                expected = by_block(held, BUDGET, block)
            assert [p for p in kept[head].tolist() if p >= 0] == expected

    check()


def test_bad_arguments():
    with pytest.raises(ValueError, match="block=0 must be at least 1"):
        factory(block=0)
    with pytest.raises(ValueError, match="budget=0"):
        factory(budget=0)
