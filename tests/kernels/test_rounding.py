"""Bounds in 8 bits: never inward, and no further outward than one step of the type."""

import jax.numpy as jnp
import numpy as np
import pytest

from sejax.kernels import gpu_rows, pages
from sejax.kernels.rounding import outward

SMALL = jnp.float8_e4m3fn


def values() -> np.ndarray:
    rng = np.random.default_rng(0)
    edges = [0.0, -0.0, 1.0, -1.0, 448.0, -448.0, 2.0**-9, 2.0**-10, -(2.0**-10), 1.0625, 0.1, 447.0, 15.99, 16.01]
    return np.concatenate([edges, rng.normal(size=4000) * 10.0 ** rng.integers(-4, 3, 4000)]).clip(-448, 448).astype(np.float32)


@pytest.mark.parametrize("up", [False, True])
def test_outward(up):
    x, every = values(), np.arange(256, dtype=np.uint8).view(SMALL).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    got = np.asarray(outward(jnp.asarray(x), SMALL, up))
    assert np.array_equal(got, np.asarray(jnp.asarray(got).astype(SMALL), np.float32))  # the type holds it exactly
    nearest = [every[every >= v].min() if up else every[every <= v].max() for v in x]
    assert np.array_equal(got, np.asarray(nearest, np.float32))


def test_wider_types_keep_the_value():
    x = jnp.asarray(values())
    assert np.array_equal(outward(x, jnp.bfloat16, True), x) and np.array_equal(outward(x, jnp.float32, False), x)


@pytest.mark.parametrize("new", [1, 6])
def test_scores_stay_upper_bounds_and_the_card_writes_the_same(new):
    rng = np.random.default_rng(new)
    heads, size, page, entries = 2, 16, 4, 5
    table = jnp.asarray(rng.permutation(2 * entries).reshape(2, entries), jnp.int32)
    row = jnp.asarray(np.array([[3], [8]])[:, :, None] + np.arange(new)[None, :, None] + np.zeros((1, 1, heads)), jnp.int32)
    k = jnp.asarray(rng.normal(size=(2, new, heads, size)), jnp.float32)
    low, high = (jnp.asarray(rng.normal(size=(2 * entries, heads, size)) + shift, jnp.float32).astype(SMALL) for shift in (-5, 5))
    want = pages.append_bounds.reference(low, high, k, table, row, page)
    for a, b in zip(gpu_rows.append_bounds(low, high, k, table, row, page), want, strict=True):
        assert a.dtype == SMALL and np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    q = jnp.asarray(rng.normal(size=(2, heads, 3, size)), jnp.float32)
    scores = np.asarray(pages.page_scores(q, *want, table, jnp.full((2, heads), entries)))
    logits = np.asarray(jnp.einsum("rhgd,rthd->rhgt", q, k)).max(axis=2)  # [R,H,T]
    for r, t, h in np.ndindex(2, new, heads):
        assert scores[r, h, int(row[r, t, h]) // page] >= logits[r, h, t] - 1e-5


def test_page_bounds_in_eight_bits():
    k = jnp.asarray(np.random.default_rng(3).normal(size=(3, 4, 8)), jnp.float32)
    real = jnp.asarray([[True] * 4, [True, False, False, False], [False] * 4])
    low, high = pages.page_bounds(k, real, SMALL)
    assert low.dtype == high.dtype == SMALL
    least, most, first = (np.asarray(x, np.float32) for x in (low, high, k[:, 0]))
    assert np.all(least[:2] <= first[:2]) and np.all(most[:2] >= first[:2])
    assert not np.any(least[2]) and not np.any(most[2])
