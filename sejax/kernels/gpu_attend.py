"""Split-KV attention over an AttentionView: decode, short chunks, and every mask a view can carry.

An item (row, kv head, query tile) is cut into pieces by its own length alone, so an answer never depends on a row's
neighbours. A program attends to one piece; the card's scheduler balances them, and nothing beyond a row's length is read. Each
piece leaves an fp32 partial; a second kernel merges an item's partials by log-sum-exp (FlashDecoding). Items of a single piece
leave the answer itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels import tuned
from sejax.kernels.gpu_view import Facts, arrays, facts, load, logits2, place, queries, rows_of, span
from sejax.kernels.launch import FAR, bound, dot, launch, pow2, store
from sejax.kernels.tuned import Attend
from sejax.types import Array, AttentionView

LN2 = 0.6931471805599453


class Cut(NamedTuple):
    """How items become pieces. pieces: an item is cut into, if short; longest: blocks of a piece; slots: pieces it may have."""

    pieces: int
    longest: int
    slots: int


def cutting(f: Facts, tune: Attend) -> Cut:
    """Pieces enough to fill the card, partials that stay under 2^17 query rows."""
    blocks = -(-f.tokens // f.block)
    room = max(1, 2**17 // (min(f.tile, f.new * f.group) * f.items))
    # where longer pieces still go on the card at once, twice a multiprocessor, there is no tail to balance
    double = f.items * -(-blocks // (2 * tune.longest)) <= 264 or (f.items > 264 and blocks <= 2 * tune.longest)
    longest = tune.longest * (2 if double else 1)
    longest = max(longest, -(-blocks // room))
    pieces = max(1, min(32, room, tune.fill // f.items))
    return Cut(pieces, longest, max(pieces, -(-blocks // longest)))


def _where(f: Facts, item: Array) -> tuple[Array, Array, Array]:
    """Row, head and query tile of an item."""
    pair = lax.div(item, f.tiles)
    return lax.div(pair, f.heads), lax.rem(pair, f.heads), lax.rem(item, f.tiles)


def _extent(refs: dict[str, Any], f: Facts, cut: Cut, item: Array) -> tuple[Array, Array]:
    """Token blocks of an item, and blocks of each of its pieces but the last."""
    r, h, tile = _where(f, item)
    start, end = span(refs, f, r, h)
    if "own" in refs:
        last = jnp.minimum(lax.div((tile + 1) * f.tile - 1, f.group), f.new - 1)
        own = load(refs["own"], r)
        end = jnp.minimum(end, end - own + last + 1)
    blocks = jnp.maximum(lax.div(end - start + f.block - 1, f.block), 0)
    count = jnp.minimum(lax.div(blocks + 1, 2), cut.pieces)
    count = jnp.maximum(jnp.maximum(count, lax.div(blocks + cut.longest - 1, cut.longest)), 1)
    return blocks, jnp.maximum(lax.div(blocks + count - 1, count), 1)


def _attend_piece(refs: dict[str, Any], f: Facts, cut: Cut, item: Array, n: Array) -> None:
    """Attend one item's query tile to its n-th piece, if it has one; leave the partial, or the answer where it is the only one."""
    r, h, tile = _where(f, item)
    blocks, piece = _extent(refs, f, cut, item)
    m = tile * f.tile + jnp.arange(f.tile, dtype=jnp.int32)
    exists = n * piece < blocks
    mine = m < f.new * f.group
    real = mine & exists
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
    d = jnp.arange(wide, dtype=jnp.int32)[None, :]
    row, t_, g_, d = (jnp.broadcast_to(x, (f.tile, wide)) for x in ((m - tile * f.tile)[:, None], t[:, None], g[:, None], d))
    zero = jnp.zeros((f.tile,), jnp.float32)
    nothing = (zero + FAR, zero, jnp.zeros((f.tile, wide), jnp.float32))
    top, total, acc = lax.fori_loop(n * piece, jnp.minimum((n + 1) * piece, blocks), step, nothing)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, top + jnp.log2(total), -jnp.inf)
    value = acc / total[:, None]
    if cut.slots == 1:
        store(refs["out_lse"], r, t, h, g, value=lse * LN2, mask=mine)
        ok = jnp.broadcast_to(mine[:, None], d.shape) & (d < f.value)
        store(refs["out"], r, t_, h, g_, d, value=value.astype(refs["out"].dtype), mask=ok)
        return
    slot = item * cut.slots + n
    store(refs["lse"], slot, m - tile * f.tile, value=lse, mask=real)
    store(refs["part"], slot, row, d, value=value, mask=jnp.broadcast_to(real[:, None], d.shape) & (d < f.value))


def _split(*refs_: Any, names: tuple[str, ...], f: Facts, cut: Cut, programs: int) -> None:
    refs = dict(zip(names, refs_, strict=True))
    pieces, first = f.items * cut.slots, pl.program_id(0)

    def one(i: Array, carry: Array) -> Array:
        # all first pieces before all second ones: where rows are far shorter than their tables, what is empty comes last
        place = first + i * programs
        _attend_piece(refs, f, cut, lax.rem(place, f.items), lax.div(place, f.items))
        return carry

    if pieces <= programs:
        one(jnp.int32(0), jnp.int32(0))
    else:
        lax.fori_loop(0, lax.div(pieces - first + programs - 1, programs), one, jnp.int32(0))


def _merge(*refs_: Any, names: tuple[str, ...], f: Facts, cut: Cut) -> None:
    refs = dict(zip(names, refs_, strict=True))
    item, row = pl.program_id(0), pl.program_id(1)
    r, h, tile = _where(f, item)
    m = tile * f.tile + row
    t, g = lax.div(m, f.group), lax.rem(m, f.group)
    blocks, piece = _extent(refs, f, cut, item)
    pieces = lax.div(blocks + piece - 1, piece)
    wide, some = pow2(f.value), 32
    d = jnp.arange(wide, dtype=jnp.int32)

    def step(c: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, mass, acc = carry
        n = c * some + jnp.arange(some, dtype=jnp.int32)
        slot = item * cut.slots + n
        s = load(refs["lse"], slot, row, mask=n < pieces, other=-jnp.inf)
        at, row_, d_ = (jnp.broadcast_to(x, (some, wide)) for x in (slot[:, None], row, d[None, :]))
        ok = jnp.broadcast_to((n < pieces)[:, None] & (d < f.value)[None, :], (some, wide))
        o = load(refs["part"], at, row_, d_, mask=ok, other=0.0)
        high = jnp.maximum(top, jnp.max(s))
        w, fade = jnp.exp2(s - high), jnp.exp2(top - high)
        return high, mass * fade + jnp.sum(w), acc * fade + jnp.sum(w[:, None] * o, axis=0)

    carry = (jnp.float32(FAR), jnp.float32(0), jnp.zeros((wide,), jnp.float32))
    top, mass, acc = lax.fori_loop(0, lax.div(pieces + some - 1, some), step, carry)
    real = m < f.new * f.group
    empty = mass <= 0
    value = (acc / jnp.where(empty, 1.0, mass)).astype(refs["out"].dtype)
    store(refs["out"], r, t, h, g, d, value=value, mask=real & (d < f.value))
    merged = jnp.where(empty, -jnp.inf, (top + jnp.log2(jnp.where(empty, 1.0, mass))) * LN2)
    store(refs["out_lse"], r, t, h, g, value=merged, mask=real)


def attend(q: Array, view: AttentionView, tune: Attend | None = None) -> tuple[Array, Array]:
    """Softmax attention of q [R,T,H,G,D] over what `view` lists: same contract as `kernels.attention.attend`.

    Returns out [R,T,H,G,Dv] in q's dtype and lse f32[R,T,H,G]; a query that sees nothing has out 0 and lse -inf.
    """
    q = view.q if view.q is not None else q
    rows, new, heads, group, size = q.shape
    tune = tune or tuned.attend(size, view.k.dtype.itemsize, new * group, rows * heads)
    f = facts(q, view, tune.tile, tune.block)
    cut = cutting(f, tune)
    named = arrays(q, view)
    answer = [
        jax.ShapeDtypeStruct((rows, new, heads, group, f.value), q.dtype),
        jax.ShapeDtypeStruct((rows, new, heads, group), jnp.float32),
    ]
    wide = min(f.tile, new * group)
    slots = f.items * cut.slots
    programs = min(slots, tune.programs)
    split = functools.partial(launch, name="attend_split", warps=tune.warps, stages=tune.stages)
    if cut.slots == 1:
        kernel = bound(_split, names=(*named, "out", "out_lse"), f=f, cut=cut, programs=programs)
        out, lse = split(kernel, (programs,), answer, list(named.values()))
        return out, lse
    shapes = [jax.ShapeDtypeStruct((slots, wide, f.value), jnp.float32), jax.ShapeDtypeStruct((slots, wide), jnp.float32)]
    kernel = bound(_split, names=(*named, "part", "lse"), f=f, cut=cut, programs=programs)
    part, part_lse = split(kernel, (programs,), shapes, list(named.values()))
    named = {name: named[name] for name in ("length", "first", "own") if name in named} | {"part": part, "lse": part_lse}
    kernel = bound(_merge, names=(*named, "out", "out_lse"), f=f, cut=cut)
    out, lse = launch(kernel, (f.items, wide), answer, list(named.values()), name="attend_merge")
    return out, lse
