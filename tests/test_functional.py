"""What the functional API promises at its edges; the laws test the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sejax
from tests.models.tiny import tiny_model

MODEL = tiny_model(layers=1)
METHOD = sejax.method("snapkv:budget=12,window=4,slack=4")


@pytest.fixture(scope="module")
def cache() -> sejax.Cache:
    return sejax.init(MODEL, METHOD, slots=2, max_len=20)


def same(a: sejax.Cache, b: sejax.Cache) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_past_max_len_logits_are_nan_and_nothing_is_stored(cache: sejax.Cache) -> None:
    tokens = np.arange(21) % 101
    logits, after = sejax.prefill(MODEL, METHOD, cache, tokens, 0)
    assert np.isnan(logits).all() and same(cache, after)
    logits, full = sejax.prefill(MODEL, METHOD, cache, tokens, 0, length=20)
    assert np.isfinite(logits).all() and full.length.tolist() == [20, 0]
    logits, after = sejax.decode(MODEL, METHOD, full, [1, 1], [0, 1])
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert after.length.tolist() == [20, 1] and np.array_equal(sejax.kept(after, 0)[0], sejax.kept(full, 0)[0])


def test_a_turn_of_no_tokens_changes_nothing(cache: sejax.Cache) -> None:
    _, held = sejax.prefill(MODEL, METHOD, cache, np.arange(21) % 101, 0, length=15)
    logits, after = sejax.prefill(MODEL, METHOD, held, np.arange(21) % 101, 0, length=0)
    assert np.isnan(logits).all() and same(held, after)


def test_slot_length_and_tokens_may_be_traced(cache: sejax.Cache) -> None:
    tokens = jnp.arange(21) % 101

    @jax.jit
    def turn(cache: sejax.Cache, tokens: jax.Array, slot: jax.Array, length: jax.Array) -> tuple[jax.Array, sejax.Cache]:
        logits, cache = sejax.prefill(MODEL, METHOD, cache, tokens, slot, length)
        session = sejax.take(cache, slot)
        return logits, sejax.put(sejax.clear(cache, slot), 1 - slot, session)

    logits, moved = turn(cache, tokens, jnp.int32(1), jnp.int32(15))
    plain, expected = sejax.prefill(MODEL, METHOD, cache, tokens, 1, 15)
    np.testing.assert_allclose(logits, plain, atol=1e-4)
    assert moved.length.tolist() == [15, 0]
    assert np.array_equal(sejax.kept(moved, 0)[0], sejax.kept(expected, 1)[0])
    assert (np.asarray(sejax.kept(moved, 1)[0]) == -1).all()
    _, outside = turn(cache, tokens, jnp.int32(5), jnp.int32(15))
    assert outside.length.tolist() == [0, 0]


def test_bad_input_is_told_in_a_sentence(cache: sejax.Cache) -> None:
    with pytest.raises(ValueError, match=r"slot=2 is not one of the cache's slots 0\.\.1"):
        sejax.prefill(MODEL, METHOD, cache, [1], 2)
    with pytest.raises(ValueError, match="the cache was made for snapkv"):
        sejax.decode(MODEL, sejax.method("full"), cache, [1], [0])
    with pytest.raises(ValueError, match=r"both be i32\[R\]"):
        sejax.decode(MODEL, METHOD, cache, [1, 2], [0])
    with pytest.raises(ValueError, match="T >= 1"):
        sejax.prefill(MODEL, METHOD, cache, np.zeros((2, 3), np.int32), 0)
    with pytest.raises(ValueError, match="slots=0 and max_len=4"):
        sejax.init(MODEL, METHOD, 0, 4)
    other = sejax.take(sejax.init(MODEL, sejax.method("full"), 1, 20), 0)
    with pytest.raises(ValueError, match="the session was made with full"):
        sejax.put(cache, 0, other)
