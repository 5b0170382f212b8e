"""Row writers of the card against their references: interpreted, lowered for CUDA, and (marked gpu) on the card."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sejax.kernels import gpu_rows, pages, rows
from tests.kernels.test_gpu_kernels import abstract, lowered


def writing(batch: int, new: int, heads: int, size: int, page: int, seed: int, dtype=jnp.float32):
    """Leaves k [N,H,P,D] and pos [N,H,P], a table with a padding row, rows to write with some dropped, values."""
    rng = np.random.default_rng(seed)
    entries = -(-(new + 2 * page) // page)
    total = batch * entries + 2
    table = rng.permutation(total)[: batch * entries].reshape(batch, entries)
    if batch > 1:
        table[-1] = total
    start = rng.integers(-2, page + 1, (batch, 1, heads))
    row = start + np.arange(new)[None, :, None]
    row = np.where(row < 0, -1, row)
    k = jnp.asarray(rng.normal(size=(total, heads, page, size)), dtype)
    pos = jnp.asarray(rng.integers(0, 99, (total, heads, page)), jnp.int32)
    values = jnp.asarray(rng.normal(size=(batch, new, heads, size)), dtype)
    at = jnp.asarray(rng.integers(0, 99, (batch, new, heads)), jnp.int32)
    return (k, pos), jnp.asarray(table, jnp.int32), jnp.asarray(row, jnp.int32), (values, at)


def check_writers(batch: int, new: int, heads: int, size: int, page: int, seed: int, dtype=jnp.float32) -> None:
    leaves, table, row, values = writing(batch, new, heads, size, page, seed, dtype)
    put = getattr(rows.put, "reference", rows.put)
    got = gpu_rows.put(leaves, table, row, values)
    for a, leaf, value in zip(got, leaves, values, strict=True):
        assert np.array_equal(np.asarray(a, np.float32), np.asarray(put(leaf, table, row, value), np.float32))
    low, high = leaves[0][:, :, 0] - 1, leaves[0][:, :, 0] + 1
    want = getattr(pages.append_bounds, "reference", pages.append_bounds)(low, high, values[0], table, row, page)
    for a, b in zip(gpu_rows.append_bounds(low, high, values[0], table, row, page), want, strict=True):
        assert np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("new, size, page", [(1, 64, 16), (21, 96, 4), (5, 32, 1), (19, 32, 64)])
def test_writers(new, size, page):
    check_writers(3, new, 2, size, page, seed=new)


def test_writers_lower_for_cuda():
    leaves, table, row, values = abstract(writing(2, 20, 8, 128, 16, 0, jnp.bfloat16))
    assert "xla.gpu.triton" in lowered(gpu_rows.put, leaves, table, row, values)
    bound = jax.ShapeDtypeStruct((leaves[0].shape[0], 8, 128), jnp.bfloat16)
    assert "xla.gpu.triton" in lowered(lambda *given: gpu_rows.append_bounds(*given, 16), bound, bound, values[0], table, row)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, new, page", [(64, 1, 16), (2, 2048, 16), (3, 100, 64), (5, 33, 1)])
def test_card_writers(batch, new, page):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    check_writers(batch, new, 8, 128, page, seed, jnp.bfloat16)
