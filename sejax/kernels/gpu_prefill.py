"""Chunk prefill at cuDNN's speed: listed tokens copied next to each other, prefix and causal tail merged by fp32 lse.

The copy costs 1-4 % of the attention it serves. Every (row, kv head) is one batch entry of cuDNN's fused attention with
its own run-time key length, so ragged heads need nothing special and one compilation serves every prefix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels.gpu_view import Facts, facts, place, rows_of
from sejax.kernels.launch import bound, launch, pow2, store
from sejax.types import Array, AttentionView

ALIGN = 256  # cuDNN reads whole tiles of keys: what it may touch beyond the length must be finite


def _copy(k_pool: Any, v_pool: Any, ids: Any, start: Any, stop: Any, k_out: Any, v_out: Any, *, f: Facts, fill: bool) -> None:
    pair, c = pl.program_id(0), pl.program_id(1)
    h, r = lax.rem(pair, f.heads), lax.div(pair, f.heads)
    low, high = start[r, h], stop[r, h]
    i = c * f.block + jnp.arange(f.block, dtype=jnp.int32)
    live = low + i < high

    @pl.when(fill | (c * f.block < lax.div(high - low + ALIGN - 1, ALIGN) * ALIGN))
    def _() -> None:
        spot = place(ids, f, r, h, jnp.minimum(low + i, f.tokens - 1), live)
        for pool, out, size in ((k_pool, k_out, f.size), (v_pool, v_out, f.value)):
            shape = (f.block, pow2(size))
            at, d = (jnp.broadcast_to(x, shape) for x in (i[:, None], jnp.arange(pow2(size), dtype=jnp.int32)[None, :]))
            store(out, r, h, at, d, value=rows_of(pool, spot, size, live), mask=(at < out.shape[2]) & (d < size))


def contiguous(view: AttentionView, start: Array, stop: Array, tokens: int, fill: bool = False, block: int = 64) -> tuple[Array, Array]:
    """Listed tokens [start, stop) i32[R,H] of every row and head, side by side: k [R,H,tokens,D], v [R,H,tokens,Dv].

    After the last one come zeros: up to a multiple of 256 (beyond, nothing is written), or to the end with `fill`.
    """
    rows, heads = start.shape
    shape = jax.ShapeDtypeStruct((rows, 1, heads, 1, view.k.shape[-1]), view.k.dtype)
    f = facts(shape, view, 16, block)
    outs = [jax.ShapeDtypeStruct((rows, heads, tokens, pool.shape[-1]), pool.dtype) for pool in (view.k, view.v)]
    grid = (rows * heads, -(-tokens // block))
    kernel = bound(_copy, f=f, fill=fill)
    k, v = launch(kernel, grid, outs, [view.k, view.v, view.ids, start, stop], name="contiguous")
    return k, v


def cudnn(q: Array, k: Array, v: Array, length: Array | None, scale: float) -> tuple[Array, Array]:
    """cuDNN's fused attention. q [B,T,G,D], k, v [B,C,1,D]; length i32[B] keys that count, None: causal from the start.

    Returns out [B,T,G,D] and lse f32[B,G,T]. The only place that touches jax's private module: its public twin rounds
    the lse to the input's dtype.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    kind = fused.MaskType.CAUSAL if length is None else fused.MaskType.PADDING
    new = None if length is None else jnp.full(length.shape, q.shape[1], jnp.int32)
    lengths: Any = {"q_seqlen": new, "kv_seqlen": length}
    found: Any = fused.dot_product_attention(q, k, v, **lengths, scale=scale, mask_type=kind, return_residual=True)
    return found[0], found[1]


def attend(q: Array, view: AttentionView) -> tuple[Array, Array]:
    """Attention of a chunk's queries over `view`: same contract as `kernels.attention.attend`, for what `fits`."""
    from sejax.kernels.attention import merge  # attention imports this file

    q = view.q if view.q is not None else q
    rows, new, heads, group, size = q.shape
    scale = view.scale if view.scale is not None else size**-0.5
    length = view.length if view.length.ndim == 2 else jnp.broadcast_to(view.length[:, None], (rows, heads))
    first = jnp.zeros_like(length) if view.first is None else view.first.reshape(rows, -1) + jnp.zeros_like(length)
    stop = length if view.own is None else jnp.maximum(length - view.own[:, None], 0)
    flat = jnp.moveaxis(q, 2, 1).reshape(rows * heads, new, group, size)

    def both(low: Array, high: Array, tokens: int, count: Array | None) -> tuple[Array, Array]:
        k, v = (x.astype(q.dtype).reshape(rows * heads, tokens, 1, -1) for x in contiguous(view, low, high, tokens, count is None))
        out, lse = cudnn(flat, k, v, count, scale)
        out = jnp.moveaxis(out.reshape(rows, heads, new, group, -1), 1, 2)
        return out, jnp.moveaxis(lse.reshape(rows, heads, group, new), 3, 1)

    count = jnp.clip(stop - first, 0, view.ids.shape[-1] * view.run)
    out, lse = both(first, stop, view.ids.shape[-1] * view.run, jnp.maximum(count, 1).reshape(-1))
    some = (count > 0)[:, None, :, None]
    parts = [(jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf))]
    if view.own is not None:
        parts.append(both(stop, length, new, None))
    return merge(parts)


def fits(q: Array, view: AttentionView) -> bool:
    """Whether cuDNN can serve it: 16-bit queries, no mask beyond lengths and the causal tail, D and Dv <= 256 alike."""
    plain = view.bias is None and view.softcap is None and (view.pos is None or view.q_pos is None)
    sizes = q.shape[-1] == view.v.shape[-1] and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    whole = view.own is None or view.first is None
    return plain and sizes and whole and q.dtype in (jnp.bfloat16, jnp.float16)
