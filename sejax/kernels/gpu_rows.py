"""Writing tokens into paged leaves in place: several leaves in one launch, and Quest's bounds as keys arrive.

XLA needs a locate, a scatter and their fusions for each leaf of each layer; a decode step of a sparse method feels them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels.launch import bound, launch, load, pow2, store
from sejax.kernels.rounding import outward
from sejax.types import Array


def _wide(x: Array, width: int) -> tuple[Array, Array]:
    """Row index x i32[B] and lane, both [B, width]."""
    shape = (x.shape[0], width)
    return jnp.broadcast_to(x[:, None], shape), jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], shape)


def _put(table: Any, row: Any, *refs: Any, count: int, block: int) -> None:
    values, outs = refs[:count], refs[2 * count :]
    pages, heads, page = outs[0].shape[:3]
    pair = pl.program_id(0)
    h, r = lax.rem(pair, heads), lax.div(pair, heads)
    b = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    real = b < row.shape[1]
    at = load(row, r, b, h, mask=real, other=-1)
    entry, offset = lax.div(at, page), lax.rem(at, page)
    inside = real & (at >= 0) & (entry < table.shape[1])
    target = load(table, r, entry, mask=inside, other=-1)
    inside &= (target >= 0) & (target < pages)
    target = jnp.where(inside, target, pages)  # idle lanes name no page: no two lanes share a row
    for value, out in zip(values, outs, strict=True):
        if len(out.shape) == 3:
            store(out, target, h, offset, value=load(value, r, b, h, mask=inside, other=0).astype(out.dtype), mask=inside)
            continue
        width = pow2(out.shape[3])
        at_b, d = _wide(b, width)
        mask = jnp.broadcast_to(inside[:, None], d.shape) & (d < out.shape[3])
        new = load(value, r, at_b, h, d, mask=mask, other=jnp.zeros((), value.dtype)).astype(out.dtype)
        store(out, _wide(target, width)[0], h, _wide(offset, width)[0], d, value=new, mask=mask)


def put(leaves: tuple[Array, ...], table: Array, row: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
    """Store values [R,B,H] or [R,B,H,D] of each leaf [N,H,P] or [N,H,P,D] at rows i32[R,B,H]; negative rows are dropped.

    Rows of one sequence are distinct. Leaves are updated in place where their buffers may be reused.
    """
    rows, new, heads = row.shape
    block = min(16, pow2(new))
    count = len(leaves)
    kernel = bound(_put, count=count, block=block)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    aliases = {2 + count + i: i for i in range(count)}
    grid = (rows * heads, -(-new // block))
    return tuple(launch(kernel, grid, shapes, [table, row, *values, *leaves], name="put_rows", warps=1 if new == 1 else 4, aliases=aliases))


def puts(leaves: tuple[Array, ...], table: Array, row: Array, values: tuple[Array, ...]) -> bool:
    """Whether `put` covers it: one table for all heads, rows of at most one axis, floats cast among 16 and 32 bits, offsets in 32 bits."""
    plain = ("float32", "bfloat16", "float16")

    def fine(leaf: Array, value: Array) -> bool:
        same = leaf.dtype == value.dtype or (leaf.dtype.name in plain and value.dtype.name in plain)
        return same and leaf.ndim in (3, 4) and value.ndim == leaf.ndim and leaf.size < 2**31 and leaf.dtype != jnp.bool_

    return table.ndim == 2 and row.size > 0 and table.size > 0 and all(fine(a, b) for a, b in zip(leaves, values, strict=True))


def _claim(slot: Any, count: Any, n_in: Any, dropped_in: Any, row: Any, n: Any, dropped: Any, *, room: int) -> None:
    r = pl.program_id(0)
    slots, heads, new = n.shape[0], n.shape[1], row.shape[1]
    h, t = jnp.arange(pow2(heads), dtype=jnp.int32), jnp.arange(pow2(new), dtype=jnp.int32)
    at, more = slot[r], count[r]
    known = (h < heads) & (at >= 0) & (at < slots)
    at = jnp.minimum(jnp.maximum(at, 0), slots - 1)
    held, lost = load(n_in, at, h, mask=known, other=0), load(dropped_in, at, h, mask=known, other=0)
    wanted = held + more
    store(n, at, h, value=jnp.minimum(wanted, room), mask=known)
    store(dropped, at, h, value=lost + wanted - jnp.minimum(wanted, room), mask=known)
    shape = (t.shape[0], h.shape[0])
    t, h = jnp.broadcast_to(t[:, None], shape), jnp.broadcast_to(h[None, :], shape)
    place = held[None, :] + t
    store(row, r, t, h, value=jnp.where((t < more) & (place < room), place, -1), mask=(t < new) & (h < heads))


def claim(n: Array, dropped: Array, slot: Array, count: Array, new: int, room: int) -> tuple[Array, Array, Array]:
    """See `kernels.rows.claim`."""
    shapes = [
        jax.ShapeDtypeStruct((len(slot), new, n.shape[1]), jnp.int32),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (n, dropped)),
    ]
    kernel = bound(_claim, room=room)
    row, n, dropped = launch(kernel, (len(slot),), shapes, [slot, count, n, dropped], name="claim_rows", warps=1, aliases={2: 1, 3: 2})
    return row, n, dropped


def claims(n: Array, dropped: Array, slot: Array, count: Array, new: int, room: int) -> bool:
    """Whether `claim` covers it: decode steps and short chunks, whose rows one program numbers."""
    return n.size > 0 and slot.size > 0 and 0 < new * n.shape[1] <= 2048


def _bounds(k: Any, table: Any, row: Any, low_in: Any, high_in: Any, low: Any, high: Any, *, page: int, block: int) -> None:
    pages, heads, size = low.shape
    new = k.shape[1]
    pair = pl.program_id(0)
    h, r = lax.rem(pair, heads), lax.div(pair, heads)
    t = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)

    def entry(t: Array, real: Array) -> tuple[Array, Array]:
        """Page (`pages`: none) and offset of tokens."""
        at = load(row, r, jnp.minimum(t, new - 1), h, mask=real, other=-1)
        inside = real & (at >= 0) & (lax.div(at, page) < table.shape[1])
        found = load(table, r, lax.div(at, page), mask=inside, other=-1)
        return jnp.where((found >= 0) & (found < pages), found, pages), lax.rem(at, page)

    mine, offset = entry(t, t < new)
    before, _ = entry(jnp.maximum(t - 1, 0), (t > 0) & (t < new))
    leads = (mine < pages) & (before != mine)
    fresh = leads & (offset == 0)
    width = pow2(size)
    at_t, d = _wide(t, width)

    def same(i: Array) -> Array:
        return leads & (entry(t + i, t + i < new)[0] == mine)

    def more(state: tuple[Array, Array, Array]) -> Array:
        return jnp.sum(same(state[0]).astype(jnp.int32)) > 0

    def widen(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, least, most = state
        mask = jnp.broadcast_to(same(i)[:, None], d.shape) & (d < size)
        key = load(k, r, jnp.minimum(at_t + i, new - 1), h, d, mask=mask, other=jnp.zeros((), k.dtype))
        key = key.astype(jnp.float32)
        least = jnp.where(mask, jnp.minimum(least, outward(key, low.dtype, False)), least)
        return i + 1, least, jnp.where(mask, jnp.maximum(most, outward(key, high.dtype, True)), most)

    mask = jnp.broadcast_to(leads[:, None], d.shape) & (d < size)
    spot = (_wide(jnp.where(leads, mine, pages), width)[0], h, d)  # idle lanes name no page: no two lanes share one
    old = mask & ~jnp.broadcast_to(fresh[:, None], d.shape)
    least = jnp.where(old, load(low_in, *spot, mask=old, other=jnp.zeros((), low.dtype)).astype(jnp.float32), jnp.inf)
    most = jnp.where(old, load(high_in, *spot, mask=old, other=jnp.zeros((), low.dtype)).astype(jnp.float32), -jnp.inf)
    if new == 1:
        _, least, most = widen((jnp.int32(0), least, most))
    else:
        _, least, most = lax.while_loop(more, widen, (jnp.int32(0), least, most))
    store(low, *spot, value=least.astype(low.dtype), mask=mask)
    store(high, *spot, value=most.astype(high.dtype), mask=mask)


def append_bounds(low: Array, high: Array, k: Array, table: Array, row: Array, page: int) -> tuple[Array, Array]:
    """Widen the bounds of the pages new keys fall into; a page's first token resets them. See `kernels.pages`.

    low, high [N,H,D]; k [R,T,H,D]; table i32[R,M]; row i32[R,T,H] (negative: none), a page's tokens are neighbours in T.
    """
    rows, new, heads = row.shape
    block = min(16, pow2(new))
    shapes = [jax.ShapeDtypeStruct(low.shape, low.dtype), jax.ShapeDtypeStruct(high.shape, high.dtype)]
    grid = (rows * heads, -(-new // block))
    kernel = bound(_bounds, page=page, block=block)
    args = [k, table, row, low, high]
    low, high = launch(kernel, grid, shapes, args, name="append_bounds", warps=1 if new == 1 else 4, aliases={3: 0, 4: 1})
    return low, high


def bounded(low: Array, high: Array, k: Array, table: Array, row: Array, page: int) -> bool:
    """Whether `append_bounds` covers it: floats, keys of 16 or 32 bits, offsets in 32 bits, one table for all heads."""
    plain = {"float32", "bfloat16", "float16"}
    kinds = {low.dtype.name, high.dtype.name} <= plain | {"float8_e4m3fn"} and k.dtype.name in plain
    return table.ndim == 2 and row.size > 0 and table.size > 0 and low.size < 2**31 and kinds
