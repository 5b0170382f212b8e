"""Row leaves of a slot, and the ring of a sequence's last queries."""

from __future__ import annotations

import jax.numpy as jnp

from sejax.types import Array, Rows


def of_slot(leaf: Array, rows: Rows) -> Array:
    """leaf [S,...] -> [R,...]; a padding row (slot S) reads zeros: a sequence that holds nothing yet."""
    return leaf.at[rows.slot].get(mode="fill", fill_value=0)


def remember(ring: Array, q: Array, rows: Rows) -> Array:
    """Keep each row's last W queries: position p lies at p % W. ring [S,W,H,G,D], q [R,T,H,G,D] -> ring."""
    width, new = ring.shape[1], jnp.arange(q.shape[1], dtype=jnp.int32)
    last = (new < rows.count[:, None]) & (new >= rows.count[:, None] - width)
    at = jnp.where(last, (rows.start[:, None] + new) % width, width)
    return ring.at[rows.slot[:, None], at].set(q.astype(ring.dtype), mode="drop")


def recall(ring: Array, end: Array, width: int) -> tuple[Array, Array]:
    """The last W queries in order and their positions: ring [R,W,...], end i32[R] -> [R,W,...], i32[R,W]."""
    pos = end[:, None] - width + jnp.arange(width, dtype=jnp.int32)
    at = (pos % width).reshape(*pos.shape, *([1] * (ring.ndim - 2)))
    return jnp.take_along_axis(ring, at, axis=1), pos


def join(ring: Array, fresh: Array, old: Rows, new: Rows, width: int) -> Array:
    """The query ring after a turn: this turn's queries where it has them, older ones elsewhere. -> [R,W,H,G,D]."""
    end = (new.start + new.count)[:, None]
    index = jnp.arange(width, dtype=jnp.int32)
    pos = end - 1 - (end - 1 - index) % width  # newest position below `end` that lies at this index
    mine = (pos >= new.start[:, None]).reshape(*pos.shape, 1, 1, 1)
    return jnp.where(mine, fresh, of_slot(ring, old))
