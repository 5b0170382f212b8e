"""The layer loop's pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sejax.kernels.linear import product
from sejax.models import decoder, logits, model
from tests.models.tiny import tiny_model


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 0.1), ("float16", 0.02)])
def test_product(dtype, atol):
    """Every form the row count selects gives the same product; an odd output size too."""
    rng = np.random.default_rng(0)
    for rows in (1, 2, 7, 32, 33, 64):
        for out in (6, 7):
            x, w, b = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((rows, 16), (out, 16), (out,)))
            expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
            y = product(x, w, b)
            assert y.dtype == dtype
            np.testing.assert_allclose(np.asarray(y, np.float32), expected + np.asarray(b, np.float32), atol=atol)
            exact = product(x, w, dtype=jnp.float32)
            assert exact.dtype == jnp.float32
            np.testing.assert_allclose(exact, expected, atol=1e-5)


def test_blocks_do_not_change_attention(monkeypatch):
    m, tokens = tiny_model(), jnp.asarray(np.random.default_rng(1).integers(0, 101, (2, 50)))
    whole = jax.jit(logits)(m, tokens)
    monkeypatch.setattr(model, "QUERY_BLOCK", 16)
    np.testing.assert_allclose(jax.jit(lambda *a: logits(*a))(m, tokens), whole, atol=1e-5)


def test_causal():
    m, tokens = tiny_model(family="qwen3", tie_embeddings=False), np.random.default_rng(1).integers(0, 101, (1, 20))
    f, changed = jax.jit(logits), tokens.copy()
    changed[0, 12] = (changed[0, 12] + 1) % 101
    a, b = f(m, tokens), f(m, changed)
    np.testing.assert_array_equal(a[:, :12], b[:, :12])
    assert np.abs(a[:, 12:] - b[:, 12:]).max() > 0.1


def test_specs_are_static():
    """Equal models share a compiled program, whatever their weights."""
    a, b = tiny_model(seed=0), tiny_model(seed=1)
    assert decoder.specs(a.config, "float32") == decoder.specs(b.config, jnp.float32)
    assert hash(decoder.specs(a.config, "float32")[0])
    assert jax.tree.structure(a) == jax.tree.structure(b)


def test_fingerprint():
    a, b = tiny_model(seed=0), tiny_model(seed=1)
    assert a.fingerprint() == tiny_model(seed=0).fingerprint() != b.fingerprint()
    up = a.params["layers"][1]["gate_up"]
    for other in (up.at[3, 4].add(1e-6), up[::-1], up.astype("bfloat16")):
        layers = (a.params["layers"][0], a.params["layers"][1] | {"gate_up": other})
        assert a.replace(params=a.params | {"layers": layers}).fingerprint() != a.fingerprint()
    assert a.fingerprint() != tiny_model(seed=0, norm_eps=1e-5).fingerprint()
    assert tiny_model(dtype="bfloat16").fingerprint()
