"""Token rows of paged leaves: where they lie, how they are appended, taken and put. Leaves are [N,H,P,...]."""

from __future__ import annotations

import jax.numpy as jnp

from sejax.kernels import dispatch
from sejax.types import Array


def locate(table: Array, row: Array, page: int, pages: int) -> tuple[Array, Array]:
    """Page id and offset of physical rows. table i32[R,M], row i32[R,...] -> two i32[R,...].

    A negative row, or one past the table, gets page id `pages`, out of range: scatters drop it, gathers clamp it.
    """
    entry = row // page
    inside = (row >= 0) & (entry < table.shape[1])
    flat = jnp.clip(entry, 0, table.shape[1] - 1).reshape(row.shape[0], -1)
    ids = jnp.take_along_axis(table, flat, axis=1).reshape(row.shape)
    return jnp.where(inside, ids, pages), row % page


def spots(shape: tuple[int, ...], table: Array, row: Array) -> tuple[Array, Array, Array]:
    """Page, head and offset of rows i32[R,H,B] of a leaf of this shape [N,H,P,...].

    table i32[R,M] pages, or i32[R,H,M] head pages (page * H + head).
    """
    pages, heads, page = shape[:3]
    if table.ndim == 2:
        at, offset = locate(table, row, page, pages)
        return at, jnp.arange(heads, dtype=jnp.int32)[:, None], offset
    entry = row // page
    inside = (row >= 0) & (entry < table.shape[2])
    found = jnp.take_along_axis(table, jnp.clip(entry, 0, table.shape[2] - 1), axis=2)
    return jnp.where(inside, found // heads, pages), found % heads, row % page


@dispatch.claim
def claim(n: Array, dropped: Array, slot: Array, count: Array, new: int, room: int) -> tuple[Array, Array, Array]:
    """The rows where the next tokens of each sequence go: behind those it holds, while there is room.

    n, dropped i32[S,H] rows held and tokens that found no room; slot, count i32[R]; new: T; room: rows of a run.
    Returns row i32[R,T,H] (-1: not stored), and both leaves with the tokens counted.
    """
    held, token = n.at[slot].get(mode="fill", fill_value=0), jnp.arange(new, dtype=jnp.int32)
    row = held[:, None, :] + token[None, :, None]
    row = jnp.where((token < count[:, None])[..., None] & (row < room), row, -1)
    wanted = held + count[:, None]
    after = jnp.minimum(wanted, room)
    return row, n.at[slot].set(after, mode="drop"), dropped.at[slot].add(wanted - after, mode="drop")


def head_pages(table: Array, heads: int) -> tuple[Array, Array]:
    """Page and head slice of each entry, broadcastable to [R,H,M]: table i32[R,M] pages, or i32[R,H,M] head pages."""
    if table.ndim == 2:
        return table[:, None, :], jnp.arange(heads, dtype=jnp.int32)[:, None]
    return table // heads, table % heads


@dispatch.put
def put(leaf: Array, table: Array, row: Array, values: Array) -> Array:
    """Store values [R,B,H,...] at rows i32[R,B,H]; negative rows are dropped. leaf [N,H,P,...], table as in spots -> leaf."""
    page, head, offset = spots(leaf.shape, table, jnp.swapaxes(row, 1, 2))
    return leaf.at[page, head, offset].set(jnp.swapaxes(values, 1, 2).astype(leaf.dtype), mode="drop")


@dispatch.puts
def puts(leaves: tuple[Array, ...], table: Array, row: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
    """`put` for several leaves with the same rows: one launch on a card."""
    return tuple(put(leaf, table, row, value) for leaf, value in zip(leaves, values, strict=True))


def take(leaf: Array, table: Array, row: Array) -> Array:
    """Read rows i32[R,H,B] -> [R,H,B,...]; rows outside give any stored value. table as in spots."""
    page, head, offset = spots(leaf.shape, table, row)
    return leaf[jnp.clip(page, 0, leaf.shape[0] - 1), head, offset]
