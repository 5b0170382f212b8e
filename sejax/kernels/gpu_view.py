"""What the kernels share about an AttentionView: its arrays by name, its static facts, and the mask of a tile.

Listed token j of row r and head h lies at (page, head, offset) of the pool; ids are clamped, never followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sejax.kernels.launch import dot, load, pow2
from sejax.types import Array, AttentionView

LOG2E = 1.4426950408889634
Spot = tuple[Array, Array, Array]


class Facts(NamedTuple):
    """Static facts of one call. tile: query rows (t, g) of a program's tile; block: listed tokens of one step."""

    rows: int
    new: int
    heads: int
    group: int
    size: int
    value: int
    pages: int
    page: int
    run: int
    entries: int
    scale: float
    softcap: float | None
    window: int | None
    tile: int
    block: int

    @property
    def tokens(self) -> int:
        """Listed tokens a row can hold."""
        return self.entries * self.run

    @property
    def tiles(self) -> int:
        """Query tiles of one row and head."""
        return -(-self.new * self.group // self.tile)

    @property
    def items(self) -> int:
        """(row, head, query tile) triples."""
        return self.rows * self.heads * self.tiles


def facts(q: Array | jax.ShapeDtypeStruct, view: AttentionView, tile: int, block: int) -> Facts:
    """Static facts of q [R,T,H,G,D] over `view`."""
    rows, new, heads, group, size = q.shape
    scale = view.scale if view.scale is not None else size**-0.5
    pages, _, page, value = view.v.shape
    entries = view.ids.shape[-1]
    extra = (view.softcap, view.window, tile, block)
    return Facts(rows, new, heads, group, size, value, pages, page, view.run, entries, scale, *extra)


def arrays(q: Array, view: AttentionView) -> dict[str, Array]:
    """The arrays a kernel takes, by name; absent ones are left out."""
    found = {"q": q, "k": view.k, "v": view.v, "ids": view.ids, "length": view.length, "first": view.first}
    found |= {"own": view.own if q.shape[1] > 1 else None, "bias": view.bias}
    if view.pos is not None and view.q_pos is not None:
        found |= {"pos": view.pos, "q_pos": view.q_pos}
    return {name: array for name, array in found.items() if array is not None}


def bound(ref: Any, r: Array, h: Array) -> Array:
    """Entry of a per-row or per-head array i32[R] or i32[R,H]."""
    return load(ref, *((r,) if len(ref.shape) == 1 else (r, h)))


def span(refs: Mapping[str, Any], f: Facts, r: Array, h: Array) -> tuple[Array, Array]:
    """Listed tokens [first, length) of a row and head, inside what the row can hold."""
    length = jnp.clip(bound(refs["length"], r, h), 0, f.tokens)
    first = jnp.maximum(bound(refs["first"], r, h), 0) if "first" in refs else jnp.zeros_like(length)
    return first, length


def place(ids: Any, f: Facts, r: Array, h: Array, j: Array, live: Array) -> Spot:
    """Page, head and offset of listed tokens j i32[B]."""
    sub = f.page // f.run
    at = lax.div(j, f.run)
    if len(ids.shape) == 2:
        entry = jnp.clip(load(ids, r, at, mask=live, other=0), 0, f.pages * sub - 1)
        page, head = lax.div(entry, sub), jnp.broadcast_to(h, j.shape)
    else:
        entry = jnp.clip(load(ids, r, h, at, mask=live, other=0), 0, f.pages * f.heads * sub - 1)
        page = lax.div(entry, sub * f.heads)
        head = lax.rem(lax.div(entry, sub), f.heads)
    return page, head, lax.rem(entry, sub) * f.run + lax.rem(j, f.run)


def rows_of(pool: Any, spot: Spot, size: int, live: Array) -> Array:
    """Token rows [B, pow2(size)] of a pool [N,H,P,size]; what is not live, or past `size`, is 0."""
    page, head, offset = (x[:, None] for x in spot)
    d = jnp.arange(pow2(size), dtype=jnp.int32)[None, :]
    mask = live[:, None] if pow2(size) == size else live[:, None] & (d < size)
    shape = (live.shape[0], pow2(size))
    index = (jnp.broadcast_to(x, shape) for x in (page, head, offset, d))
    return load(pool, *index, mask=jnp.broadcast_to(mask, shape), other=jnp.zeros((), pool.dtype))


def queries(q: Any, f: Facts, r: Array, h: Array, t: Array, g: Array, mask: Array) -> Array:
    """Query rows [B, pow2(D)] for index arrays t, g."""
    d = jnp.arange(pow2(f.size), dtype=jnp.int32)[None, :]
    shape = (t.shape[0], pow2(f.size))
    ok = jnp.broadcast_to(mask[:, None] & (d < f.size), shape)
    at_t, at_g, d = (jnp.broadcast_to(x, shape) for x in (t[:, None], g[:, None], d))
    return load(q, r, at_t, h, at_g, d, mask=ok, other=jnp.zeros((), q.dtype))


def logits2(
    refs: Mapping[str, Any],
    f: Facts,
    q: Array,
    k: Array,
    spot: Spot,
    t: Array,
    r: Array,
    h: Array,
    j: Array,
    live: Array,
    flip: bool = False,
    raw: bool = False,
) -> Array:
    """Masked logits times log2(e) of query rows at new tokens t against keys k of listed tokens j at `spot`.

    f32[B_q,B_k], or with `flip` f32[B_k,B_q], whose sums over queries stay inside a thread. `raw` leaves tokens that are
    not live to the caller: their keys are 0 and their logits finite.
    """
    key = (lambda x: x[:, None]) if flip else (lambda x: x[None, :])
    query = (lambda x: x[None, :]) if flip else (lambda x: x[:, None])
    k = k.astype(q.dtype)
    s = dot(k, q, trans_b=True) if flip else dot(q, k, trans_b=True)
    if f.softcap is None:
        s *= f.scale * LOG2E
    else:
        s = (f.softcap * LOG2E) * jnp.tanh(s * (f.scale / f.softcap))
    if "bias" in refs:
        s += key(load(refs["bias"], r, h, j, mask=live, other=0.0) * LOG2E)
    if raw and "own" not in refs and "pos" not in refs:
        return s
    seen = key(live)
    if "own" in refs:
        last = bound(refs["length"], r, h) - load(refs["own"], r) + t
        seen &= key(j) <= query(last)
    if "pos" in refs:
        pos = key(load(refs["pos"], *spot, mask=live, other=0))
        at = query(load(refs["q_pos"], r, jnp.minimum(t, f.new - 1)))
        seen &= pos <= at
        if f.window is not None:
            seen &= pos > at - f.window
    return jnp.where(seen, s, -jnp.inf)
