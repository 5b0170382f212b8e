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


def spots(leaf: Array, table: Array, row: Array) -> tuple[Array, Array, Array]:
    """Page, head and offset of rows i32[R,H,B]. table i32[R,M] pages, or i32[R,H,M] head pages (page * H + head)."""
    pages, heads, page = leaf.shape[:3]
    if table.ndim == 2:
        at, offset = locate(table, row, page, pages)
        return at, jnp.arange(heads, dtype=jnp.int32)[:, None], offset
    entry = row // page
    inside = (row >= 0) & (entry < table.shape[2])
    found = jnp.take_along_axis(table, jnp.clip(entry, 0, table.shape[2] - 1), axis=2)
    return jnp.where(inside, found // heads, pages), found % heads, row % page


@dispatch.put
def put(leaf: Array, table: Array, row: Array, values: Array) -> Array:
    """Store values [R,B,H,...] at rows i32[R,B,H]; negative rows are dropped. leaf [N,H,P,...], table as in spots -> leaf."""
    page, head, offset = spots(leaf, table, jnp.swapaxes(row, 1, 2))
    return leaf.at[page, head, offset].set(jnp.swapaxes(values, 1, 2).astype(leaf.dtype), mode="drop")


@dispatch.puts
def puts(leaves: tuple[Array, ...], table: Array, row: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
    """`put` for several leaves with the same rows: one launch on a card."""
    return tuple(put(leaf, table, row, value) for leaf, value in zip(leaves, values, strict=True))


def take(leaf: Array, table: Array, row: Array) -> Array:
    """Read rows i32[R,H,B] -> [R,H,B,...]; rows outside give any stored value. table as in spots."""
    page, head, offset = spots(leaf, table, row)
    return leaf[jnp.clip(page, 0, leaf.shape[0] - 1), head, offset]
