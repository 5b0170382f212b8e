"""Expected attention: the vectors, statistics over uneven chunks."""

import jax.numpy as jnp
import numpy as np
import pytest

from sejax.methods import expected_attention as factory
from sejax.methods.expected_attention import ahead, attended, moments, statistics, turn
from sejax.types import Qkv, Rows
from tests.methods.handmade import Sequence, spec_of, vectors

CASES = vectors("expected_attention")
HEADS, GROUP, DIM, LENGTH, SINKS, FUTURE = 2, 2, 4, 8, 2, 3
SPEC = spec_of(HEADS, GROUP, DIM)


def sums(q, chunks):
    """The statistics of q [Hq,T,D], gathered chunk by chunk with padding."""
    rule, total, start = statistics(SINKS), None, 0
    for count in chunks:
        part = np.zeros((1, LENGTH, HEADS, GROUP, DIM), np.float32)
        part[0, :count] = np.moveaxis(q[:, start : start + count].reshape(HEADS, GROUP, count, DIM), 2, 0)
        part[0, count:] = 7  # padding must not count
        one = jnp.ones(1, jnp.int32)
        rows = Rows(one, one * start, one * count, one[:, None], one[:, None])
        added = rule.of(SPEC, Qkv(part, part[..., 0, :], part[..., 0, :], jnp.asarray(part), part[..., 0, :]), rows)
        total = added if total is None else {name: total[name] + added[name] for name in added}
        start += count
    return total


@pytest.mark.parametrize("chunks", [(8,), (1, 4, 3)])
def test_moments_and_scores(chunks):
    case = CASES["gqa_vnorm"]
    inputs, expected = case["inputs"], case["expected"]
    mean, spread = moments(sums(inputs["q_prerope"], chunks))
    flat = lambda x: np.asarray(x).reshape(HEADS * GROUP, *x.shape[3:])  # noqa: E731
    np.testing.assert_allclose(flat(mean), expected["mu"], atol=1e-5)
    np.testing.assert_allclose(flat(spread), expected["cov_biased"], atol=1e-5)
    cos, sin = ahead(SPEC, jnp.full(1, LENGTH), FUTURE)
    np.testing.assert_allclose(turn(jnp.eye(DIM)[None], cos, sin)[0].T, expected["R_mean"], atol=1e-5)
    turned = jnp.swapaxes(turn(jnp.swapaxes(turn(spread, cos, sin), -1, -2), cos, sin), -1, -2)
    np.testing.assert_allclose(flat(turn(mean, cos, sin)), expected["mu_rotated"], atol=1e-5)
    np.testing.assert_allclose(flat(turned), expected["cov_rotated"], atol=1e-5)
    keys = jnp.asarray(inputs["k_postrope"], jnp.float32)[None]
    real = jnp.broadcast_to(jnp.arange(LENGTH) >= SINKS, (1, HEADS, LENGTH))
    for name, used in (("with_cov", turned), ("without_cov", None)):
        found = np.exp(attended(keys, turn(mean, cos, sin), used, real)[0, :, SINKS:])
        np.testing.assert_allclose(found, expected[name]["mean_softmax_no_vnorm"], atol=1e-5)
        weighted = found * np.linalg.norm(inputs["v"][:, SINKS:], axis=-1)
        np.testing.assert_allclose(weighted, np.asarray(expected[name]["score_with_sinks"])[:, SINKS:], atol=1e-5)


def test_weights_too_small_for_a_float_still_differ():
    keys = jnp.linspace(0, -300, 7)[None, None, :, None]
    found = np.asarray(attended(keys, jnp.ones((1, 1, 2, 1)), None, jnp.ones((1, 1, 7), bool)))[0, 0]
    np.testing.assert_allclose(found, np.linspace(0, -300, 7), atol=1e-4)


@pytest.mark.parametrize(("name", "field"), [("gqa_vnorm", "with_cov"), ("gqa_vnorm", "without_cov"), ("ratio_0_keep_all", "")])
def test_sets_through_the_seal(name, field):
    """Sinks get inf here, max + 1 in the vectors: the same sets."""
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    budget = 4 if field else 8
    spec = f"expected_attention:budget={budget},sinks=2,future=3,covariance={field != 'without_cov'},slack=2,page=2".lower()
    k = inputs["k_postrope"]
    sequence = Sequence(spec, HEADS, GROUP, DIM, 16)
    q = inputs.get("q_prerope", np.ones((HEADS * GROUP, LENGTH, DIM)))
    sequence.prompt(q, k, inputs.get("v", k), q_raw=q)
    assert sequence.kept == (np.asarray(expected[field]["kept"]).tolist() if field else [list(range(8))] * 2)


def test_bad_arguments():
    with pytest.raises(ValueError, match="budget=4 must be larger than sinks=4"):
        factory(budget=4)
    with pytest.raises(ValueError, match="future=0"):
        factory(future=0)
