"""Quest on the card: page scores read straight from the bounds through the table, and exact k-best selection.

Tang et al. 2024 (arXiv 2406.10774). A score is two small matrix products, up . high + down . low, so the bounds pass
through the matrix units once. Selection finds the k-th best key by two bits a pass on order-preserving integers, all in
registers, then compacts by one running count; wide rows are first cut to the k best of each piece.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels import tuned
from sejax.kernels.launch import bound, dot, launch, load, pow2, store
from sejax.kernels.tuned import Scores
from sejax.types import Array

WIDE = 8192  # entries one program selects from: what its registers hold
LEAST = -(2**31)
NEVER = -2139095041  # the ordered key of -inf


def _scores(q_ref: Any, low: Any, high: Any, ids: Any, count: Any, out: Any, *, block: int, steps: int) -> None:
    pages, heads, size = low.shape
    group, width = q_ref.shape[2], ids.shape[1]
    pieces = -(-width // (block * steps))
    x = pl.program_id(0)
    h, rest = lax.rem(x, heads), lax.div(x, heads)  # heads fastest: a page's heads lie side by side in memory
    r, base = lax.div(rest, pieces), lax.rem(rest, pieces) * (block * steps)
    wide = pow2(size)
    g = jnp.arange(max(16, pow2(group)), dtype=jnp.int32)
    d = jnp.arange(wide, dtype=jnp.int32)
    shape = (g.shape[0], wide)
    at_g, at_d = jnp.broadcast_to(g[:, None], shape), jnp.broadcast_to(d[None, :], shape)
    q = load(q_ref, r, h, at_g, at_d, mask=(at_g < group) & (at_d < size), other=jnp.zeros((), q_ref.dtype))
    zero = jnp.zeros((), q.dtype)
    up, down = jnp.maximum(q, zero), jnp.minimum(q, zero)
    limit = jnp.minimum(count[r, h], width)

    def step(i: Array, carry: Array) -> Array:
        j = base + i * block + jnp.arange(block, dtype=jnp.int32)
        live = j < limit
        page = jnp.clip(load(ids, r, j, mask=live, other=0), 0, pages - 1)
        shape = (block, wide)
        at, at_d = jnp.broadcast_to(page[:, None], shape), jnp.broadcast_to(d[None, :], shape)
        mask = jnp.broadcast_to(live[:, None], shape) & (at_d < size)
        top = load(high, at, h, at_d, mask=mask, other=jnp.zeros((), high.dtype)).astype(q.dtype)
        bottom = load(low, at, h, at_d, mask=mask, other=jnp.zeros((), low.dtype)).astype(q.dtype)
        s = dot(up, top, trans_b=True) + dot(down, bottom, trans_b=True)
        best = jnp.max(jnp.where(g[:, None] < group, s, -jnp.inf), axis=0)
        store(out, r, h, j, value=jnp.where(live, best, -jnp.inf), mask=j < width)
        return carry

    lax.fori_loop(0, steps, step, jnp.int32(0))


def page_scores(q: Array, low: Array, high: Array, ids: Array, count: Array, tune: Scores | None = None) -> Array:
    """Upper bound of any logit in each page, unscaled, the largest over a kv head's queries; see `kernels.pages`.

    q [R,H,G,D]; low, high [N,H,D]; ids i32[R,M] pages; count i32[R,H] pages to score -> f32[R,H,M], -inf beyond.
    """
    rows, heads = q.shape[:2]
    width = ids.shape[1]
    tune = tune or tuned.scores(q.shape[3], q.dtype.itemsize)
    block = min(tune.block, max(16, pow2(width)))
    steps = min(tune.steps, -(-width // block))
    grid = (rows * heads * -(-width // (block * steps)),)
    kernel = bound(_scores, block=block, steps=steps)
    shape = jax.ShapeDtypeStruct((rows, heads, width), jnp.float32)
    return launch(kernel, grid, [shape], [q, low, high, ids, count], name="page_scores", warps=tune.warps, stages=tune.stages)[0]


def _threshold(key: Array, want: Array) -> Array:
    """Largest key T with at least `want` keys >= T, or an earlier T with exactly `want`: two bits a pass from the top."""

    def count2(a: Array, b: Array) -> tuple[Array, Array]:
        both = jnp.sum((key >= a).astype(jnp.int32) + ((key >= b).astype(jnp.int32) << 16))
        return both & 0xFFFF, lax.shift_right_logical(both, 16)

    def more(state: tuple[Array, Array, Array]) -> Array:
        shift, _, found = state
        return (shift >= 0) & (found != want)

    def narrow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        shift, prefix, found = state
        one, two, three = (prefix | (jnp.int32(i) << shift) for i in (1, 2, 3))
        n1, n2 = count2(one ^ LEAST, two ^ LEAST)
        n3 = jnp.sum((key >= (three ^ LEAST)).astype(jnp.int32))
        best = jnp.where(n3 >= want, three, jnp.where(n2 >= want, two, jnp.where(n1 >= want, one, prefix)))
        found = jnp.where(n3 >= want, n3, jnp.where(n2 >= want, n2, jnp.where(n1 >= want, n1, found)))
        return shift - 2, best, found

    state = (jnp.int32(30), jnp.int32(0), jnp.int32(key.shape[0]))
    return lax.while_loop(more, narrow, state)[1] ^ LEAST


def _chosen(scores: Any, row: Array, part: Array, k: int, piece: int, tile: int) -> tuple[Array, Array, Array, Array, Array]:
    """The k best of a piece: per lane its index, score, whether it is chosen and its slot (k: none); and how many there are."""
    local = jnp.arange(tile, dtype=jnp.int32)
    at = part * piece + local
    inside = (local < piece) & (at < scores.shape[1])
    value = load(scores, row, at, mask=inside, other=-jnp.inf)
    bits = lax.bitcast_convert_type(value, jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    real = inside & (key > NEVER)
    key = jnp.where(real, key, LEAST)
    want = jnp.minimum(jnp.sum(real.astype(jnp.int32)), k)
    limit = jnp.maximum(_threshold(key, want), LEAST + 1)
    above, equal = key > limit, key == limit
    upto = jnp.cumsum(above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16))
    n_above, n_equal = upto & 0xFFFF, lax.shift_right_logical(upto, 16)
    ties = want - jnp.sum(above.astype(jnp.int32))
    chosen = (above | (equal & (n_equal <= ties))) & (want > 0)
    slot = jnp.where(chosen, n_above + jnp.minimum(n_equal, ties) - 1, k)  # k: nobody's, so no two lanes share a slot
    return at, value, chosen, slot, want


def _select(scores: Any, out: Any, values: Any, *, k: int, piece: int, tile: int) -> None:
    row, part = pl.program_id(0), pl.program_id(1)
    at, value, chosen, slot, want = _chosen(scores, row, part, k, piece, tile)
    store(out, row, part, slot, value=at, mask=chosen)
    store(values, row, part, slot, value=value, mask=chosen)
    rest = jnp.arange(pow2(k), dtype=jnp.int32)
    empty = (rest >= want) & (rest < k)
    store(out, row, part, rest, value=jnp.full(rest.shape, scores.shape[1]), mask=empty)
    store(values, row, part, rest, value=jnp.full(rest.shape, -jnp.inf, jnp.float32), mask=empty)


def _listed(*refs_: Any, names: tuple[str, ...], k: int, page: int, tile: int) -> None:
    refs = dict(zip(names, refs_, strict=True))
    scores, table, out, row = refs["scores"], refs["table"], refs["out"], pl.program_id(0)
    heads, width = refs["n"].shape[1], table.shape[1]
    r, h = lax.div(row, heads), lax.rem(row, heads)
    at, _, chosen, slot, want = _chosen(scores, row, jnp.int32(0), k, scores.shape[1], tile)
    if "pages" in refs:  # candidates of a wide row: which pages they are
        at = load(refs["pages"], row, at, mask=chosen, other=0)
    held = refs["n"][r, h]
    others = jnp.maximum(lax.div(held + page - 1, page) - 1, 0)
    store(out, r, h, slot, value=load(table, r, at, mask=chosen, other=0) * heads + h, mask=chosen)
    rest = jnp.arange(pow2(k + 1), dtype=jnp.int32)
    tail = (rest >= want) & (rest <= k)
    last = load(table, r, jnp.where(rest == want, jnp.minimum(others, width - 1), width - 1), mask=tail, other=0)
    store(out, r, h, rest, value=last * heads + h, mask=tail)
    refs["length"][r, h] = jnp.where(held > 0, want * page + held - others * page, 0)


def listed(scores: Array, k: int, table: Array, n: Array, page: int) -> tuple[Array, Array]:
    """See `kernels.pages.listed`; one program a row and head, after one that cuts wide rows to candidates."""
    rows, heads, width = scores.shape
    named = {"scores": scores.reshape(-1, width), "table": table, "n": n}
    if width > WIDE:
        named["pages"], named["scores"] = _candidates(named["scores"], k)
    shapes = [jax.ShapeDtypeStruct((rows, heads, k + 1), jnp.int32), jax.ShapeDtypeStruct((rows, heads), jnp.int32)]
    tile = max(16, pow2(named["scores"].shape[1]))
    kernel = bound(_listed, names=(*named, "out", "length"), k=k, page=page, tile=tile)
    out, length = launch(kernel, (rows * heads,), shapes, [*named.values()], name="list_pages", warps=4 if tile <= 1024 else 8)
    return out, length


def lists(scores: Array, k: int, table: Array, n: Array, page: int) -> bool:
    """Whether `listed` covers it: rows whose candidates one program's registers hold, one table for all heads."""
    return selects(scores, k) and -(-scores.shape[-1] // _piece(k)) * k <= WIDE and table.ndim == 2


def _piece(k: int) -> int:
    """Entries of a wide row from which k candidates come."""
    return max(WIDE // 4, pow2(2 * k))


def _candidates(scores: Array, k: int, piece: int | None = None, warps: int | None = None) -> tuple[Array, Array]:
    """The k best of each piece of wide rows: indices and scores, in ascending order, so that a tie still goes to the lowest."""
    at, best = (x.reshape(len(scores), -1) for x in _best(scores, k, piece or _piece(k), warps))
    return at, best


def _best(scores: Array, k: int, piece: int, warps: int | None = None) -> tuple[Array, Array]:
    """The k best of each piece: indices i32[rows,pieces,k] ascending (the row's width where none is left) and their scores."""
    rows, width = scores.shape
    pieces = -(-width // piece)
    tile = max(16, pow2(min(piece, width)))
    shapes = [jax.ShapeDtypeStruct((rows, pieces, k), dtype) for dtype in (jnp.int32, jnp.float32)]
    kernel = bound(_select, k=k, piece=min(piece, width), tile=tile)
    warps = warps or (4 if pieces > 1 or tile <= 1024 else 8)
    at, best = launch(kernel, (rows, pieces), shapes, [scores], name="select", warps=warps)
    return at, best


def select(scores: Array, k: int, warps: int | None = None, piece: int | None = None) -> Array:
    """Indices of the k best scores, ties to the lowest index, ascending. f32[...,M] -> i32[...,k]; see `kernels.pages`.

    -inf scores are never chosen: the tail of a row with fewer candidates is M.
    """
    width = scores.shape[-1]
    flat = scores.reshape(-1, width)
    if width <= WIDE:
        at = _best(flat, k, WIDE, warps)[0][:, 0]
    else:
        found, best = _candidates(flat, k, piece, warps)
        inner = select(best, k)
        at = jnp.take_along_axis(jnp.pad(found, ((0, 0), (0, 1)), constant_values=width), inner, axis=1)
    return at.reshape(*scores.shape[:-1], k)


def selects(scores: Array, k: int) -> bool:
    """Whether `select` covers the shape: fp32, and each cut of a wide row at least halves it."""
    return scores.dtype == jnp.float32 and 0 < k <= WIDE // 2 and scores.size > 0
