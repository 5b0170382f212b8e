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


@dispatch.put
def put(leaf: Array, table: Array, row: Array, values: Array) -> Array:
    """Store values [R,B,H,...] at rows i32[R,B,H]; negative rows are dropped. leaf [N,H,P,...] -> leaf."""
    page, offset = locate(table, row, leaf.shape[2], leaf.shape[0])
    head = jnp.arange(leaf.shape[1])
    return leaf.at[page, head, offset].set(values.astype(leaf.dtype), mode="drop")


@dispatch.puts
def puts(leaves: tuple[Array, ...], table: Array, row: Array, values: tuple[Array, ...]) -> tuple[Array, ...]:
    """`put` for several leaves with the same rows: one launch on a card."""
    return tuple(put(leaf, table, row, value) for leaf, value in zip(leaves, values, strict=True))


def take(leaf: Array, table: Array, row: Array) -> Array:
    """Read rows i32[R,H,B] -> [R,H,B,...]; rows outside give any stored value."""
    page, offset = locate(table, row, leaf.shape[2], leaf.shape[0])
    head = jnp.arange(leaf.shape[1])[:, None]
    return leaf[jnp.clip(page, 0, leaf.shape[0] - 1), head, offset]
