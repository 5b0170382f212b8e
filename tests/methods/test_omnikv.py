"""OmniKV: the vectors, a second turn, truncation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax.kernels.tokens import token_logits
from sejax.methods import omnikv as factory
from sejax.methods.omnikv import choose, place, scores
from tests.methods.handmade import Sequence, spec_of, vectors
from tests.oracles.omnikv import token_scores

CASES = vectors("omnikv")


def pooled_logits(q, k):
    """q [Hq,D], k [H,T,D] -> f32[1,H,G,T], from a pool of one page."""
    heads, length, dim = k.shape
    grouped = jnp.asarray(q, jnp.float32).reshape(1, heads, -1, dim)
    return token_logits(grouped, jnp.asarray(k, jnp.float32)[None], jnp.zeros((1, 1), jnp.int32), jnp.full(1, length))


@pytest.mark.parametrize(
    ("name", "selector", "count"),
    [("last_selector", "last", 3), ("softmax_before_last_selector", "softmax", 3), ("ties_all_equal", "last", 2)],
)
def test_selectors(name, selector, count):
    """The window selectors (`uniform`, `exp`) are not offered: METHODS 0 names "last" and its softmax form."""
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    found = scores(pooled_logits(inputs["filter_q"], inputs["filter_k_prompt"]), selector)
    if "token_score" in expected:
        np.testing.assert_allclose(found[0], expected["token_score"], atol=1e-5)
    np.testing.assert_array_equal(choose(found, jnp.full(1, count), count)[0], expected["selected_sorted"])


def test_a_following_layers_output():
    """The prompt and two decoded tokens in a following layer, the choice given by the observer."""
    inputs, expected = CASES["last_selector"]["inputs"], CASES["last_selector"]["expected"]
    layer = Sequence("omnikv:observers=(0,),budget=3,wait=0,page=2", 2, 2, 2, 12, index=1, layers=2)
    k, v = inputs["sparse_k_prompt"], inputs["sparse_v_prompt"]
    layer.prompt(np.zeros((4, 8, 2)), k, v)
    for t in range(2):
        layer.carry = jnp.asarray(expected["selected_sorted"], jnp.int32)[None]
        out = layer.token(inputs["sparse_q"], inputs["sparse_k_decode"][:, t], inputs["sparse_v_decode"][:, t])
    np.testing.assert_allclose(out, expected["sparse_layer_out"], atol=1e-5)


def test_numbers_selected():
    case = CASES["num_selected_fraction"]
    for row, expected in zip(case["inputs"]["rows"].tolist(), case["expected"]["selected"].tolist(), strict=True):
        wanted, length = row
        given = dict(ratio=wanted) if wanted < 1 else dict(budget=int(wanted))
        layer = factory(observers=(0,), **given).layer(spec_of(1, 1, 2), None)
        counts = layer.seal.__self__.counts(10000)
        assert counts[int(length)] == expected


def test_layout():
    case = CASES["layer_layout"]
    filters, layers = tuple(case["params"]["filters"].tolist()), case["params"]["num_layers"]
    places = [place(layer, filters, case["params"]["num_wait_load_layers"]) for layer in range(layers)]
    assert [i for i, p in enumerate(places) if p != "follow"] == case["expected"]["dense_layers"].tolist()
    follows = {str(i): max(f for f in filters if f < i) for i, p in enumerate(places) if p == "follow"}
    assert follows == case["expected"]["sparse_layer_uses_filter"]


def test_random_choices_equal_the_formula():
    run = jax.jit(
        lambda q, k, n, selector: choose(scores(token_logits(q, k, jnp.arange(6)[None], n), selector), n // 2, 12), static_argnums=3
    )

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(0, 24), st.sampled_from(["last", "softmax"]), st.booleans())
    def check(seed, n, selector, ties):
        rng = np.random.default_rng(seed)
        q, k = rng.standard_normal((1, 2, 3, 4)), rng.standard_normal((24, 2, 4))
        q, k = (np.round(q), np.round(k)) if ties and selector == "last" else (q, k)
        pool = np.moveaxis(k.reshape(6, 4, 2, 4), 2, 1)
        found = np.asarray(run(q.astype(np.float32), pool.astype(np.float32), np.asarray([n], np.int32), selector))[0]
        expected = [] if not n else np.argsort(-token_scores(q[0].astype(np.float32), k[:n].astype(np.float32), selector), kind="stable")
        assert [p for p in found.tolist() if p < 24] == sorted(list(expected)[: n // 2])

    check()


def test_truncation_shortens_the_prompt():
    rng = np.random.default_rng(0)
    layer = Sequence("omnikv:observers=(0,),budget=3,wait=0,page=2", 1, 1, 2, 12, index=1, layers=2)
    layer.prompt(*rng.standard_normal((3, 1, 8, 2)))
    state = layer.layer.truncate(layer.state, layer._rows(5, 0))
    assert state.rows["prompt"][1] == 5 and (state.rows["n"][1] == 5).all()
    assert (layer.layer.truncate(layer.state, layer._rows(9, 0)).rows["prompt"] == layer.state.rows["prompt"]).all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(observers=()), "observers=\\(\\) is empty"),
        (dict(observers=(2,), budget=4, ratio=0.5), "both given"),
        (dict(observers=(2,), ratio=1.5), "ratio=1.5"),
        (dict(observers=(2,), wait=-1), "wait=-1"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        factory(**arguments)


def test_observers_must_be_layers_of_the_model():
    with pytest.raises(ValueError, match="a model of 2 layers has not"):
        factory(observers=(5,)).layer(spec_of(1, 1, 2, 0, 2), None)
