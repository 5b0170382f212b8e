"""Attention of a chunk's query tiles over chosen blocks of what a view lists: the reading of sparse prefill.

A tile is `width` queries whose positions lie between two multiples of `width`; a block is `size` listed tokens in a row. Every tile
becomes a row of its own with its own list of pages, so the attention kernels that read only what is listed serve it as they are:
what no tile chose is neither read nor multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sejax.kernels.attention import attend, gather
from sejax.kernels.launch import on_gpu
from sejax.types import Array, AttentionView

STEP = 32768  # listed tokens of which block_means holds a copy at a time
TOGETHER = 16  # tiles a card works on at a time; elsewhere one at a time, so that each stops at its own list's end


def tiles_of(new: int, width: int) -> int:
    """Tiles that a call of `new` queries can touch, wherever it starts."""
    return -(-(new + width - 1) // width)


def split(x: Array, lead: Array, width: int) -> Array:
    """[R,T,...] by tile: [R,tiles,width,...]; lead i32[R] places of the first tile lie before the call.

    Places without a query repeat one.
    """
    count = tiles_of(x.shape[1], width)
    at = jnp.clip(jnp.arange(count * width, dtype=jnp.int32) - lead[:, None], 0, x.shape[1] - 1)
    return x[jnp.arange(x.shape[0])[:, None], at].reshape(x.shape[0], count, width, *x.shape[2:])


def join(x: Array, lead: Array, new: int) -> Array:
    """The inverse of split: [R,tiles,width,...] -> [R,T,...]."""
    flat = x.reshape(x.shape[0], -1, *x.shape[3:])
    return flat[jnp.arange(x.shape[0])[:, None], lead[:, None] + jnp.arange(new, dtype=jnp.int32)]


def each(f: Callable[..., Any], *trees: Any) -> Any:
    """f over all tiles, a few at a time: trees have axes [R,tiles,...], f takes and gives [R * few, ...]."""
    rows, count = jax.tree.leaves(trees)[0].shape[:2]
    groups = -(-count // (TOGETHER if on_gpu() else 1))
    few = -(-count // groups)

    def grouped(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, groups * few - count)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, groups, few, *x.shape[2:]), 1, 0).reshape(groups, rows * few, *x.shape[2:])

    def whole(y: Array) -> Array:
        y = jnp.moveaxis(y.reshape(groups, rows, few, *y.shape[2:]), 0, 1)
        return y.reshape(rows, groups * few, *y.shape[3:])[:, :count]

    return jax.tree.map(whole, lax.map(lambda group: f(*group), jax.tree.map(grouped, trees)))


def by_head(view: AttentionView) -> Array:
    """The view's entries as head-page entries: i32[R,H,M]."""
    if view.ids.ndim == 3:
        return view.ids
    heads, sub = view.k.shape[1], view.k.shape[2] // view.run
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    entry = jnp.clip(view.ids, 0, view.k.shape[0] * sub - 1)[:, None, :]
    return (entry // sub * heads + head) * sub + entry % sub


def lengths(view: AttentionView) -> Array:
    """i32[R,H] listed tokens."""
    heads = view.k.shape[1]
    return view.length if view.length.ndim == 2 else jnp.broadcast_to(view.length[:, None], (view.length.shape[0], heads))


def blocks_of(view: AttentionView, size: int) -> int:
    """Blocks that a view can list."""
    return -(-view.ids.shape[-1] * view.run // size)


def block_means(view: AttentionView, size: int) -> tuple[Array, Array]:
    """Mean key and value of every whole block of `size` listed tokens, summed in fp32: two [R,H,B,D]; other blocks hold zeros.

    All listed keys and values are read once; copies of STEP tokens exist at a time.
    """
    blocks, entries = blocks_of(view, size), size // view.run
    some = max(1, min(blocks, STEP // size))
    ids = by_head(view)
    rows, heads = ids.shape[:2]
    ids = jnp.pad(ids, [(0, 0), (0, 0), (0, -(-blocks // some) * some * entries - ids.shape[-1])])
    length = lengths(view)

    def step(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        part = lax.dynamic_slice_in_dim(ids, i * some * entries, some * entries, axis=2)
        whole = ((i * some + jnp.arange(some) + 1) * size <= length[..., None])[..., None]

        def mean(pool: Array) -> Array:
            x = gather(pool, part, view.run).reshape(rows, heads, some, size, -1)
            return jnp.where(whole, jnp.mean(x, axis=3, dtype=jnp.float32), 0).astype(pool.dtype)

        new = (mean(view.k), mean(view.v))
        return tuple(lax.dynamic_update_slice_in_dim(a, b, i * some, axis=2) for a, b in zip(found, new, strict=True))  # type: ignore[return-value]

    width = -(-blocks // some) * some
    empty = tuple(jnp.zeros((rows, heads, width, pool.shape[-1]), pool.dtype) for pool in (view.k, view.v))
    k, v = lax.fori_loop(0, -(-jnp.max(length) // (some * size)), step, empty)
    return k[:, :, :blocks], v[:, :, :blocks]


def attend_blocks(q: Array, view: AttentionView, keep: Array, lead: Array, width: int, size: int) -> tuple[Array, Array]:
    """Attention of q [R,T,H,G,D] over those blocks of `view` that each query's tile keeps: keep bool[R,tiles,H,B].

    With `own`, a tile's own tokens must lie in blocks it keeps. -> out [R,T,H,G,Dv], lse f32[R,T,H,G]. The lists take
    4 bytes for each listed entry, kv head and tile of TOGETHER tiles.
    """
    q = q if view.q is None else view.q
    new, blocks, entries = q.shape[1], keep.shape[-1], size // view.run
    tile = jnp.arange(keep.shape[1], dtype=jnp.int32)
    end, own = lengths(view)[:, None, :], None
    if view.own is not None:
        last = jnp.clip((tile + 1) * width - lead[:, None], 0, view.own[:, None])  # queries of the call up to the tile's end
        end = end - view.own[:, None, None] + last[..., None]
        own = jnp.maximum(last - tile * width + lead[:, None], 0)
    number = jnp.arange(blocks, dtype=jnp.int32)
    keep = keep & (number * size < end[..., None])
    kept = jnp.sum(keep, axis=-1, dtype=jnp.int32)
    partial = jnp.clip(end - jnp.max(jnp.where(keep, number, 0), axis=-1) * size, 0, size)
    length = jnp.where(kept > 0, (kept - 1) * size + partial, 0)
    order = jnp.minimum(jnp.sort(jnp.where(keep, number, blocks), axis=-1), blocks - 1)
    ids = by_head(view)
    ids = jnp.pad(ids, [(0, 0), (0, 0), (0, blocks * entries - ids.shape[-1])]).reshape(*ids.shape[:2], blocks, entries)
    row = jnp.broadcast_to(jnp.arange(q.shape[0])[:, None], keep.shape[:2])
    head = jnp.arange(ids.shape[1])[:, None]

    def some(row: Array, queries: Array, order: Array, length: Array, own: Array | None) -> tuple[Array, Array]:
        listed = ids[row[:, None, None], head, order].reshape(*order.shape[:2], -1)
        return attend(queries, view.replace(q=None, ids=listed, length=length, own=own, mass=False))

    out, lse = each(some, row, split(q, lead, width), order, length, own)
    return join(out, lead, new), join(lse, lead, new)


def attend_means(q: Array, view: AttentionView, means: tuple[Array, Array], bias: Array, lead: Array, width: int) -> tuple[Array, Array]:
    """Attention over the blocks' means [R,H,B,D], each a token with `bias` f32[R,tiles,H,B] on its logit (-inf: not there)."""
    q = q if view.q is None else view.q
    row = jnp.broadcast_to(jnp.arange(q.shape[0], dtype=jnp.int32)[:, None, None], (*bias.shape[:2], 1))
    count = bias.shape[-1]

    def some(row: Array, queries: Array, bias: Array) -> tuple[Array, Array]:
        length = jnp.full(row.shape[0], count, jnp.int32)
        listed = AttentionView(*means, row, length, bias=bias, run=count, scale=view.scale, softcap=view.softcap)
        return attend(queries, listed)

    out, lse = each(some, row, split(q, lead, width), bias)
    return join(out, lead, q.shape[1]), join(lse, lead, q.shape[1])
