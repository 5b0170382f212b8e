"""OmniKV: the vectors, a second turn, truncation, calibration."""

import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sejax
from sejax import methods
from sejax.functional import trace
from sejax.kernels.tokens import token_logits
from sejax.methods import omnikv as factory
from sejax.methods.omnikv import best_observers, choose, overlap, place, scores
from sejax.models import Config
from sejax.models.rope import Rope
from tests.methods.handmade import Sequence, spec_of, vectors
from tests.models.tiny import tiny_model
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

    @settings(max_examples=200, deadline=None, derandomize=True)
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


@functools.cache
def seen(seed=0):
    """A model of five layers looked into: trace(ids), each layer's projections computed once, and the ids of a text."""
    model, ids = tiny_model(layers=5), tuple(np.random.default_rng(seed).integers(0, 101, 70).tolist())
    layers = list(trace(model, jnp.asarray(ids)[None]))
    return model, (lambda given: layers if tuple(given) == ids else list(trace(model, jnp.asarray(given)[None]))), ids


def test_a_trace_is_what_a_cache_stores():
    model, look, ids = seen()
    cache = sejax.init(model, sejax.method("full:page=8"), 1, 72)
    _, cache = sejax.prefill(model, cache.method, cache, jnp.asarray(ids), 0)
    for (spec, qkv), state in zip(look(ids), cache.states, strict=True):
        stored = np.moveaxis(np.asarray(state.pages["kv"]["k"])[np.asarray(cache.tables[0][0])], 1, 2).reshape(-1, *qkv.k.shape[2:])
        np.testing.assert_allclose(qkv.k[0], stored[: len(ids)], atol=1e-4, err_msg=str(spec.index))


def test_overlap_counts_common_tokens():
    _, look, ids = seen()
    queries, prompt, count = 6, 64, 12
    for selector in ("last", "softmax"):
        share = overlap(look, ids, 0.2, queries, selector)
        sets = {"last": [], "softmax": []}
        for _, qkv in look(ids):
            q, k = (np.asarray(x[0], np.float64) for x in (qkv.q, qkv.k))
            for kind, found in sets.items():
                found.append([{*np.argsort(-token_scores(x, k[:prompt], kind), kind="stable")[:count].tolist()} for x in q[prompt:]])
        for o, layer in itertools.product(range(5), repeat=2):
            common = [len(a & b) for a, b in zip(sets[selector][o], sets["softmax"][layer], strict=True)]
            assert share[o, layer] == pytest.approx(np.mean(common) / count, abs=1.5 / (queries * count))  # a near tie may swap
        assert selector == "last" or np.allclose(np.diag(share), 1)


def test_the_best_observers_are_those_of_a_search_over_all():
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 2), st.integers(0, 3))
    def check(seed, number, wait, dense):
        share = np.random.default_rng(seed).integers(0, 5, (7, 7)) / 4  # few values: ties

        def value(observers):
            at = [(place(i, observers, wait), [o for o in observers if o < i]) for i in range(7)]
            return sum(share[max(below), i] if what == "follow" else 1.0 for i, (what, below) in enumerate(at))

        possible = [c for c in itertools.combinations(range(7), number) if c[0] <= dense]
        found = best_observers(share, number, wait, dense)
        assert found in possible and value(found) == max(map(value, possible))

    check()
    assert best_observers(np.ones((6, 6)), 2, 0, 1) == (0, 1)  # ties go to lower layers


def test_calibration_chooses_and_tells():
    _, look, ids = seen()
    measure = methods.calibration("omnikv", observers="2", wait=0, dense="0", ratio=0.2)
    told = measure(look, [ids, ids[:9]])
    share = overlap(look, ids, 0.2, 16, "last")
    assert told["observers"] == list(best_observers(share, 2, 0, 0)) and told["tokens"] == 70
    first, second = told["observers"]
    assert told["overlap"] == pytest.approx(
        np.mean([share[first if i <= second else second, i] for i in range(5) if i not in (first, second)]), abs=1e-4
    )


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("omnikv", dict(observres=2), "no option --observres. Did you mean 'observers'"),
        ("omnikv", dict(observers="two"), "observers must be a whole number"),
        ("omnikv", dict(observers=6), "observers=6 must be between 1 and the model's 5 layers"),
        ("omnikv", dict(ratio=0), "ratio=0 must lie in"),
        ("omnikv", dict(ratio=0.01), "none has 116 tokens"),
        ("full", {}, "full needs no calibration"),
        ("omnikb", {}, "Did you mean 'omnikv'"),
    ],
)
def test_calibration_that_cannot_be(name, options, sentence):
    _, look, ids = seen()
    with pytest.raises(ValueError, match=sentence):
        methods.calibration(name, **options)(look, [ids])


def test_profiles(tmp_path):
    """Shipped ones go by the config's digest, whatever else is in the config; a file names the model that it was made for."""
    sizes = dict(layers=30, heads=9, kv_heads=3, head_dim=64, intermediate_size=1536)
    smol = Config("llama", 49152, 576, rope=Rope(64, 100000.0), eos_ids=(2,), max_position=8192, **sizes)
    fitted = factory().fitted(types.SimpleNamespace(config=smol))
    observers = dict(fitted.arguments)["observers"]
    assert len(observers) == 3 and max(observers) < 30 and fitted == factory(observers=observers) and fitted.fit is None
    assert fitted == sejax.method("omnikv:observers=auto").fitted(types.SimpleNamespace(config=smol))

    model, file = tiny_model(), tmp_path / "mine.json"
    file.write_text(json.dumps({"config": model.config.digest, "observers": [1]}))
    method = sejax.method(f"omnikv:observers={file},wait=0")
    cache = sejax.init(model, method, 1, 16)
    assert cache.method == factory(observers=(1,), wait=0)
    for wrong, sentence in (
        (factory(), "observers=auto: no profile of this model.*`sejax calibrate omnikv"),
        (factory(observers=str(tmp_path / "none.json")), "not a profile that can be read .FileNotFoundError"),
    ):
        with pytest.raises(ValueError, match=sentence):
            wrong.fitted(model)
    for text, sentence in (('{"config": "other", "observers": [1]}', "made for another model"), ("{}", "KeyError"), ("[", "can be read")):
        file.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            method.fitted(model)
    with pytest.raises(ValueError, match="observers=auto belongs to a model"):
        factory().layer(spec_of(1, 1, 2), None)
