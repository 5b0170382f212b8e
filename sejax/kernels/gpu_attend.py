"""Split-KV attention over an AttentionView: decode, short chunks, and every mask a view can carry.

The work of all rows, heads and query tiles is one line of token blocks, cut into equal pieces at run time: program p
takes blocks [p*per, (p+1)*per), whatever rows they belong to (stream-K: Osama et al. 2023, arXiv 2301.03598), so ragged
lengths and small batches fill the card alike and nothing beyond a row's length is read. Each (program, item) pair leaves
an fp32 partial in slot program + item (both grow along the line, so slots never collide); a second kernel merges the
partials of an item by log-sum-exp (FlashDecoding).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sejax.kernels.gpu_view import Facts, arrays, facts, load, logits2, place, queries, rows_of, span
from sejax.kernels.launch import FAR, dot, launch, pow2, store
from sejax.types import Array, AttentionView

LN2 = 0.6931471805599453


class Tuning(NamedTuple):
    """block: listed tokens a step; programs: pieces of the line; least: blocks worth a piece; tile: query rows."""

    block: int = 64
    programs: int = 396
    least: int = 1
    warps: int = 2
    stages: int = 5
    tile: int = 16


def tuning(size: int, itemsize: int, rows: int) -> Tuning:
    """Block sizes measured on one H200, by bytes of a token's key and by query rows a kv head serves."""
    block = 64 if pow2(size) * itemsize <= 256 else 32
    if rows <= 16:
        return Tuning(block)
    if rows <= 64:
        return Tuning(block, programs=264, warps=4, tile=64)
    return Tuning(block, programs=132, warps=8, tile=128)


def _line(refs: dict[str, Any], f: Facts, least: int, programs: int) -> tuple[Array, Array, Array]:
    """Blocks of each item i32[pow2(items)], their running sum, and blocks a program takes."""
    i = jnp.arange(pow2(f.items), dtype=jnp.int32)
    tile, pair = lax.rem(i, f.tiles), lax.div(i, f.tiles)
    head, row = lax.rem(pair, f.heads), jnp.minimum(lax.div(pair, f.heads), f.rows - 1)
    real = i < f.items
    start, end = span(refs, f, row, head, real)
    if "own" in refs:
        last = jnp.minimum(lax.div((tile + 1) * f.tile - 1, f.group), f.new - 1)
        end = jnp.minimum(end, end - load(refs["own"], row, mask=real, other=0) + last + 1)
    blocks = jnp.where(real, jnp.maximum(lax.div(end - start + f.block - 1, f.block), 0), 0)
    total = jnp.sum(blocks)
    return blocks, jnp.cumsum(blocks), jnp.maximum(lax.div(total + programs - 1, programs), least)


def _attend_item(refs: dict[str, Any], f: Facts, item: Array, slot: Array, low: Array, high: Array) -> None:
    """Attend one item's query tile to its token blocks [low, high); leave the partial in `slot`."""
    tile, pair = lax.rem(item, f.tiles), lax.div(item, f.tiles)
    h, r = lax.rem(pair, f.heads), lax.div(pair, f.heads)
    m = tile * f.tile + jnp.arange(f.tile, dtype=jnp.int32)
    real = m < f.new * f.group
    t, g = lax.div(m, f.group), lax.rem(m, f.group)
    q = queries(refs["q"], f, r, h, t, g, real)
    start, end = span(refs, f, r, h)

    def step(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        j = start + b * f.block + jnp.arange(f.block, dtype=jnp.int32)
        live = j < end
        spot = place(refs["ids"], f, r, h, j, live)
        s = logits2(refs, f, q, rows_of(refs["k"], spot, f.size, live), spot, t, r, h, j, live)
        v = rows_of(refs["v"], spot, f.value, live).astype(q.dtype)
        high_ = jnp.maximum(top, jnp.max(s, axis=1))
        p = jnp.exp2(s - high_[:, None])
        fade = jnp.exp2(top - high_)
        return high_, total * fade + jnp.sum(p, axis=1), acc * fade[:, None] + dot(p.astype(q.dtype), v)

    wide = pow2(f.value)
    zero = jnp.zeros((f.tile,), jnp.float32)
    top, total, acc = lax.fori_loop(low, high, step, (zero + FAR, zero, jnp.zeros((f.tile, wide), jnp.float32)))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    store(refs["lse"], slot, m - tile * f.tile, value=jnp.where(some, top + jnp.log2(total), -jnp.inf), mask=real)
    d = jnp.arange(wide, dtype=jnp.int32)[None, :]
    row, d = (jnp.broadcast_to(x, (f.tile, wide)) for x in ((m - tile * f.tile)[:, None], d))
    ok = jnp.broadcast_to(real[:, None], (f.tile, wide)) & (d < f.value)
    store(refs["part"], slot, row, d, value=acc / total[:, None], mask=ok)


def _split(*refs_: Any, names: tuple[str, ...], f: Facts, least: int, programs: int) -> None:
    import jax.experimental.pallas as pl

    refs = dict(zip(names, refs_, strict=True))
    p = pl.program_id(0)
    blocks, upto, per = _line(refs, f, least, programs)
    i = jnp.arange(pow2(f.items), dtype=jnp.int32)

    @pl.when(p == 0)
    def _() -> None:
        store(refs["upto"], i, value=upto)

    low = p * per
    high = jnp.minimum(low + per, jnp.sum(blocks))
    item_low = jnp.sum((upto <= low).astype(jnp.int32))
    item_high = jnp.where(low < high, jnp.sum((upto < high).astype(jnp.int32)) + 1, item_low)

    def one(item: Array, carry: Array) -> Array:
        mine = jnp.sum(jnp.where(i == item, blocks, 0))
        base = jnp.sum(jnp.where(i < item, blocks, 0))
        _attend_item(refs, f, item, p + item, jnp.maximum(low - base, 0), jnp.minimum(high - base, mine))
        return carry

    lax.fori_loop(item_low, item_high, one, jnp.int32(0))


def _merge(upto_ref: Any, part: Any, lse: Any, out: Any, out_lse: Any, *, f: Facts, least: int, programs: int) -> None:
    import jax.experimental.pallas as pl

    item, row = pl.program_id(0), pl.program_id(1)
    tile, pair = lax.rem(item, f.tiles), lax.div(item, f.tiles)
    h, r = lax.rem(pair, f.heads), lax.div(pair, f.heads)
    m = tile * f.tile + row
    t, g = lax.div(m, f.group), lax.rem(m, f.group)
    total = upto_ref[f.items - 1]
    per = jnp.maximum(lax.div(total + programs - 1, programs), least)
    base = jnp.where(item > 0, upto_ref[jnp.maximum(item - 1, 0)], 0)
    end = upto_ref[item]
    first = lax.div(base, per)
    pieces = jnp.where(end > base, lax.div(end - 1, per) + 1 - first, 0)
    wide, some = pow2(f.value), 32
    d = jnp.arange(wide, dtype=jnp.int32)

    def step(c: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, acc = carry
        n = c * some + jnp.arange(some, dtype=jnp.int32)
        slot = first + item + n
        s = load(lse, slot, row, mask=n < pieces, other=-jnp.inf)
        at, row_, d_ = (jnp.broadcast_to(x, (some, wide)) for x in (slot[:, None], row, d[None, :]))
        ok = jnp.broadcast_to((n < pieces)[:, None] & (d < f.value)[None, :], (some, wide))
        o = load(part, at, row_, d_, mask=ok, other=0.0)
        high = jnp.maximum(top, jnp.max(s))
        w, fade = jnp.exp2(s - high), jnp.exp2(top - high)
        return high, mass * fade + jnp.sum(w), acc * fade + jnp.sum(w[:, None] * o, axis=0)

    carry = (jnp.float32(FAR), jnp.float32(0), jnp.zeros((wide,), jnp.float32))
    top, mass, acc = lax.fori_loop(0, lax.div(pieces + some - 1, some), step, carry)
    real = m < f.new * f.group
    empty = mass <= 0
    value = (acc / jnp.where(empty, 1.0, mass)).astype(out.dtype)
    store(out, r, t, h, g, d, value=value, mask=real & (d < f.value))
    merged = jnp.where(empty, -jnp.inf, (top + jnp.log2(jnp.where(empty, 1.0, mass))) * LN2)
    store(out_lse, r, t, h, g, value=merged, mask=real)


def attend(q: Array, view: AttentionView, tune: Tuning | None = None) -> tuple[Array, Array]:
    """Softmax attention of q [R,T,H,G,D] over what `view` lists: same contract as `kernels.attention.attend`.

    Returns out [R,T,H,G,Dv] in q's dtype and lse f32[R,T,H,G]; a query that sees nothing has out 0 and lse -inf.
    """
    q = view.q if view.q is not None else q
    rows, new, heads, group, size = q.shape
    tune = tune or tuning(size, view.k.dtype.itemsize, new * group)
    f = facts(q, view, tune.tile, tune.block)
    named = arrays(q, view)
    wide = min(f.tile, new * group)
    slots = tune.programs + f.items
    shapes = [
        jax.ShapeDtypeStruct((pow2(f.items),), jnp.int32),
        jax.ShapeDtypeStruct((slots, wide, f.value), jnp.float32),
        jax.ShapeDtypeStruct((slots, wide), jnp.float32),
    ]
    plan = {"f": f, "least": tune.least, "programs": tune.programs}
    kernel = functools.partial(_split, names=(*named, "upto", "part", "lse"), **plan)
    tuned = {"warps": tune.warps, "stages": tune.stages}
    parts = launch(kernel, (tune.programs,), shapes, list(named.values()), name="attend_split", **tuned)
    shapes = [
        jax.ShapeDtypeStruct((rows, new, heads, group, f.value), q.dtype),
        jax.ShapeDtypeStruct((rows, new, heads, group), jnp.float32),
    ]
    out, lse = launch(functools.partial(_merge, **plan), (f.items, wide), shapes, parts, name="attend_merge")
    return out, lse
