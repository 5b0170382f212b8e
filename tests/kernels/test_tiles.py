"""Attention of tiles over blocks against a masked softmax, on this machine and (marked gpu) on the card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sejax.kernels import tiles
from sejax.types import AttentionView

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def case(rows, new, heads, group, dim, page, blocks, size, width, dtype, seed=0):
    """Random q, a view in scattered pages, tiles that begin anywhere, and blocks each keeps (its own always)."""
    rng = np.random.default_rng(seed)
    entries = blocks * size // page
    ids = rng.permutation(rows * entries).reshape(rows, entries)
    length = rng.integers((blocks - 1) * size, blocks * size + 1, rows)
    own = np.minimum(rng.integers(1, new + 1, rows), length)
    lead = rng.integers(0, width, rows)
    k, v = (rng.standard_normal((rows * entries, heads, page, dim)) for _ in "kv")
    q = rng.standard_normal((rows, new, heads, group, dim))
    keep = rng.random((rows, tiles.tiles_of(new, width), heads, blocks)) < 0.3
    for r in range(rows):
        for tile in range(keep.shape[1]):
            first, last = (length[r] - own[r] + np.clip(at * width - lead[r], 0, own[r]) for at in (tile, tile + 1))
            keep[r, tile, :, first // size : -(-last // size)] = True
    i32 = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    view = AttentionView(jnp.asarray(k, dtype), jnp.asarray(v, dtype), i32(ids), i32(length), own=i32(own), run=page)
    return jnp.asarray(q, dtype), view, jnp.asarray(keep), i32(lead)


def masked(q, view, keep, lead, width, size):
    """The same in plain fp32, everything gathered."""
    q, k, v = (x.astype(jnp.float32) for x in (q, view.k[view.ids], view.v[view.ids]))
    k, v = (jnp.moveaxis(x, 2, 1).reshape(len(x), x.shape[2], -1, x.shape[-1]) for x in (k, v))
    t, j = jnp.arange(q.shape[1]), jnp.arange(k.shape[2])
    tile = (lead[:, None] + t) // width
    seen = jnp.take_along_axis(keep, tile[:, :, None, None], axis=1)[..., j // size]  # [R,T,H,C]
    seen &= (j <= (view.length - view.own)[:, None, None] + t[:, None])[:, :, None]
    logits = jnp.einsum("rthgd,rhcd->rthgc", q, k, precision="highest") * q.shape[-1] ** -0.5
    logits = jnp.where(seen[:, :, :, None], logits, -jnp.inf)
    return jnp.einsum("rthgc,rhcd->rthgd", jax.nn.softmax(logits), v, precision="highest"), jax.nn.logsumexp(logits, axis=-1)


def compare(shape, width, size, tolerance):
    q, view, keep, lead = case(*shape)
    run = functools.partial(tiles.attend_blocks, width=width, size=size)
    out, lse = jax.jit(run, compiler_options=QUICK if tolerance < 1e-3 else None)(q, view, keep, lead)
    want, log = masked(q, view, keep, lead, width, size)
    real = np.arange(q.shape[1]) < np.asarray(view.own)[:, None]
    np.testing.assert_allclose(np.asarray(out, np.float32)[real], np.asarray(want)[real], atol=tolerance)
    np.testing.assert_allclose(np.asarray(lse)[real], np.asarray(log)[real], atol=tolerance)


@pytest.mark.parametrize(
    ("page", "blocks", "size", "width"), [(2, 5, 4, 3), (4, 6, 4, 1), (4, 3, 12, 8)], ids=["straddling", "single", "wide"]
)
def test_blocks_equal_a_mask(page, blocks, size, width):
    compare((2, 9, 2, 3, 8, page, blocks, size, width, "float32"), width, size, 2e-5)


def test_means_are_those_of_whole_blocks():
    _, view, _, _ = case(2, 9, 2, 3, 8, 2, 5, 4, 3, "float32")
    k, v = jax.jit(lambda view: tiles.block_means(view, 4), compiler_options=QUICK)(view)
    for pool, found in ((view.k, k), (view.v, v)):
        for r in range(2):
            rows = np.moveaxis(np.asarray(pool)[np.asarray(view.ids)[r]], 1, 0).reshape(2, 5, 4, 8)
            whole = np.arange(1, 6) * 4 <= int(view.length[r])
            np.testing.assert_allclose(found[r], np.where(whole[:, None], rows.mean(2), 0), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("new", "width"), [(512, 32), (300, 128), (64, 1)])
def test_blocks_on_the_card(new, width):
    compare((2, new, 8, 4, 128, 16, 12, 128, width, "bfloat16"), width, 128, 2e-2)
