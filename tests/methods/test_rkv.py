"""R-KV: the vectors, and random cases against the oracle's formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax.cache.retention import Candidates
from sejax.methods import rkv as factory
from sejax.methods.rkv import importance, redundancy, score
from tests.methods.handmade import Sequence, vectors
from tests.oracles import rkv as oracle
from tests.oracles.transformer import softmax

CASES = vectors("rkv")
OFFICIAL = [name for name in CASES if name.startswith("official")]


def parts(case):
    q, k, window = case["inputs"]["q"], case["inputs"]["k"], case["params"]["window"]
    queries = np.moveaxis(q.reshape(len(k), -1, *q.shape[1:])[:, :, -window:], 2, 0)[None]
    return jnp.asarray(queries, jnp.float32), jnp.asarray(k, jnp.float32)[None], window


@pytest.mark.parametrize("name", OFFICIAL)
def test_scores(name):
    """The official code zeroes column 0 of rows without a similar key: `zero_column0=True`."""
    case, expected = CASES[name], CASES[name]["expected"]
    queries, keys, window = parts(case)
    length, params = keys.shape[2], case["params"]
    past = jnp.broadcast_to(jnp.arange(length) < length - window, keys.shape[:3])
    seen = jnp.ones((1, window), bool)
    for kernel, field in ((1, "attention_mean"), (params["kernel"], "attention_pooled")):
        if field in expected:
            found = importance(queries, keys, seen, past, kernel)[0, :, : length - window]
            np.testing.assert_allclose(found, expected[field], atol=1e-5)
    total = jnp.full(keys.shape[:2], length)
    if "similarity" in expected:
        np.testing.assert_allclose(redundancy(keys, total, 0.5, True)[0], expected["similarity"], atol=1e-5)
        masked = [oracle.masked_similarity(np.asarray(k, np.float64), 0.5, True) for k in case["inputs"]["k"]]
        np.testing.assert_allclose(masked, expected["masked_similarity"], atol=1e-5)
    candidates = Candidates(total, None, jnp.asarray([window]), queries=queries, read=lambda name: keys)
    found = score(candidates, params["kernel"], params["mix_lambda"], 0.5, True)
    np.testing.assert_allclose(found[0, :, : length - window], expected["final_score"], atol=1e-5)


@pytest.mark.parametrize("name", [*OFFICIAL, "kv_len_lt_budget_noop"])
def test_sets_through_the_seal(name):
    """The Sparse-vLLM variant (`sparse_vllm_shared`) is another method: not offered, METHODS 0 follows the paper's code."""
    case, params = CASES[name], CASES[name]["params"]
    inputs = case["inputs"] or CASES["official_gqa"]["inputs"]
    mix = params.get("mix_lambda", 0.1)
    spec = f"rkv:budget={params['budget']},window=2,kernel={params.get('kernel', 1)},mix={mix},zero_column0=true,period=3,page=2"
    q, k = inputs["q"], inputs["k"]
    sequence = Sequence(spec, len(k), len(q) // len(k), k.shape[-1], 16)
    sequence.prompt(q, k, k)
    everything = [list(range(8))] * len(k)
    assert sequence.kept == (everything if "kept_all" in case["expected"] else case["expected"]["kept"].tolist())


WIDTH, WINDOW = 200, 4  # more than one tile


def test_random_cases_equal_the_formula():
    """Any number of candidates and of observed queries, similar and equal keys."""

    def scored(queries, keys, total, window):
        return score(Candidates(total, None, window, queries=queries, read=lambda name: keys), 3, 0.3, 0.5, False)

    run = jax.jit(scored)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, WIDTH), st.integers(1, WINDOW), st.booleans())
    def check(seed, total, window, alike):
        rng = np.random.default_rng(seed)
        window = min(window, total)
        queries, keys = rng.standard_normal((1, WINDOW, 2, 3, 4)), rng.standard_normal((1, 2, WIDTH, 4))
        keys = np.round(keys) + 0.25 if alike else keys
        f32 = lambda x: x.astype(np.float32)  # noqa: E731
        found = np.asarray(run(f32(queries), f32(keys), np.full((1, 2), total, np.int32), np.asarray([window], np.int32)))[0]
        past = total - window
        for head in range(2):
            held = keys[0, head, :total]
            like = oracle.masked_similarity(held, 0.5, False)
            edge = np.abs(held @ held.T / np.outer(*[np.linalg.norm(held, axis=-1)] * 2) - 0.5).min()
            if edge < 1e-5:  # rounding decides whether two keys are similar
                continue
            assert np.isinf(found[head, past:total]).all()
            if past:
                seen = oracle.importance(queries[0, WINDOW - window :, head], held[:past], 3)
                np.testing.assert_allclose(found[head, :past], 0.3 * seen - 0.7 * softmax(like.mean(0))[:past], atol=1e-5)

    check()


def test_bad_arguments():
    with pytest.raises(ValueError, match="budget=8 must be larger than window=8"):
        factory(budget=8)
    with pytest.raises(ValueError, match="mix=2 must lie between"):
        factory(mix=2)
