"""Read, in a prompt, only the blocks of keys that a tile of its queries looks at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sejax.cache.method import Attend, check, composed, read_by
from sejax.cache.storage import raw
from sejax.kernels import tiles
from sejax.kernels.attention import attention, mass, merge
from sejax.types import Array, AttentionView, LayerSpec, Method, Qkv, Rows, Seen


class Rule(NamedTuple):
    """What decides, for one layer. width: positions of a tile; the rest as flashprefill's arguments."""

    alpha: float | Array
    block: int
    width: int
    sinks: int
    window: int
    last: int
    shortest: int
    apart: bool
    correction: bool


class Tiling(NamedTuple):
    """Where a call's tiles lie: lead i32[R] places of the first tile before the call; whole bool[R,tiles]: reads everything."""

    lead: Array
    whole: Array


def tiling(rule: Rule, new: int, rows: Rows) -> Tiling:
    begin, end = (rows.start, rows.start + rows.count) if rows.turn is None else (rows.turn[:, 0], rows.turn[:, 1])
    number = rows.start[:, None] // rule.width + jnp.arange(tiles.tiles_of(new, rule.width), dtype=jnp.int32)
    last = (end - 1) // rule.width - rule.last
    return Tiling(rows.start % rule.width, (number > last[:, None]) | (end - begin <= rule.shortest)[:, None])


def energies(q: Array, views: tuple[AttentionView, ...], means: list[tuple[Array, Array]], rule: Rule, tiling: Tiling) -> list[Array]:
    """Each view's blocks: sum over a tile's queries of exp(q . mean key / sqrt(D)), over the largest: f32[R,tiles,H,B] <= 1 a view.

    Counted are the blocks that lie whole before the tile's first query, or (`apart`) before each query's end.
    Logits of tiles.TOGETHER tiles exist at a time: 4 bytes a query row and block.
    """
    new, width, size = q.shape[1], rule.width, rule.block
    place = jnp.arange(tiles.tiles_of(new, width) * width, dtype=jnp.int32) - tiling.lead[:, None]
    query = place.reshape(place.shape[0], -1, width)  # [R,tiles,width] number of the call's query at each place
    sees = []
    for view, (k, _) in zip(views, means, strict=True):
        length, end = tiles.lengths(view), (jnp.arange(k.shape[2], dtype=jnp.int32) + 1) * size
        until = length[:, None, None]  # tokens, from the first listed, whose whole blocks count: [R,tiles,width or 1,H]
        if view.own is not None:
            at = query + 1 if rule.apart else jnp.maximum(query[..., :1], 0)
            until = until - view.own[:, None, None, None] + at[..., None]
        seen = end <= until[..., None]
        sees.append(jnp.broadcast_to(seen, (*query.shape[:2], *seen.shape[2:])))
    own = next(view.own for view in views if view.own is not None)
    real = (query >= 0) & (query < own[:, None, None])
    asked = [tiles.split(q if view.q is None else view.q, tiling.lead, width) for view in views]
    row = jnp.broadcast_to(jnp.arange(q.shape[0])[:, None], query.shape[:2])

    def some(row: Array, real: Array, asked: list[Array], sees: list[Array]) -> list[Array]:
        logits = []
        for view, x, (k, _), seen in zip(views, asked, means, sees, strict=True):
            scale = view.scale if view.scale is not None else x.shape[-1] ** -0.5
            dots = jnp.einsum("nthgd,nhbd->nthgb", x, k[row].astype(x.dtype), preferred_element_type=jnp.float32) * scale
            logits.append(jnp.where((seen & real[..., None, None])[:, :, :, None], dots, -jnp.inf))
        top = jnp.max(jnp.stack([jnp.max(x, axis=(1, 3, 4)) for x in logits]), axis=0)  # [N,H]
        top = jnp.where(top == -jnp.inf, 0.0, top)[:, None, :, None, None]
        sums = [jnp.sum(jnp.exp(x - top), axis=(1, 3)) for x in logits]
        most = jnp.max(jnp.stack([jnp.max(x, axis=-1) for x in sums]), axis=0)
        return [x / jnp.where(most == 0, 1.0, most)[..., None] for x in sums]

    return tiles.each(some, row, real, asked, sees)


def chosen(views: tuple[AttentionView, ...], energy: list[Array], rule: Rule, tiling: Tiling) -> tuple[list[Array], list[Array]]:
    """For each view the blocks that a tile reads, and those it sees whole and leaves out: bool[R,tiles,H,B] each."""
    keep, left, before = [], [], jnp.zeros_like(tiles.lengths(views[0]))
    number, size = jnp.arange(energy[0].shape[1], dtype=jnp.int32), rule.block
    starts = []  # number of each view's first block, [R,H]
    for view in views:
        starts.append(before)
        before = before + -(-tiles.lengths(view) // size)
    at = next(i for i, view in enumerate(views) if view.own is not None)
    own = views[at].own
    assert own is not None
    base = (tiles.lengths(views[at]) - own[:, None])[:, None]  # [R,1,H] row of the call's first query
    first = base + jnp.maximum(number * rule.width - tiling.lead[:, None], 0)[..., None]
    end = base + jnp.clip((number + 1) * rule.width - tiling.lead[:, None], 0, own[:, None])[..., None]
    some = (first < end)[..., None]  # the tile has queries
    near = starts[at][:, None] + first // size - rule.window  # [R,tiles,H] the last block outside the window
    for view, share, start in zip(views, energy, starts, strict=True):
        block = jnp.arange(share.shape[-1], dtype=jnp.int32)
        reach, seen = (end, first) if view.own is not None else (tiles.lengths(view)[:, None],) * 2
        there, past = some & (block * size < reach[..., None]), (block + 1) * size <= seen[..., None]
        joint = start[:, None, :, None] + block
        wanted = (share >= rule.alpha) | (joint < rule.sinks) | (joint > near[..., None]) | tiling.whole[..., None, None]
        keep.append(there & (wanted | ~past))
        left.append(there & past & ~wanted)
    return keep, left


def as_rows(q: Array) -> Array:
    """Query heads of a group become rows of their own: [R,T,H,G,D] -> [R*G,T,H,1,D]."""
    rows, new, heads, group, size = q.shape
    return jnp.moveaxis(q, 3, 1).reshape(rows * group, new, heads, 1, size)


def listed_for(view: AttentionView, group: int) -> AttentionView:
    """The view for `as_rows` queries."""
    ids, length, own = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), (view.ids, view.length, view.own))
    return view.replace(ids=ids, length=length, own=own, q=None if view.q is None else as_rows(view.q))


def read_blocks(rule: Rule, q: Array, views: tuple[AttentionView, ...], rows: Rows) -> tuple[Array, Array]:
    """Attention over the chosen blocks and, with `correction`, the means of the others: out [R,T,H,G,D], lse f32[R,T,H,G]."""
    shape, place = q.shape, tiling(rule, q.shape[1], rows)
    means = [tiles.block_means(view, rule.block) for view in views]
    if rule.apart:
        place, means = jax.tree.map(lambda x: jnp.repeat(x, shape[3], axis=0), (place, means))
        views, q = tuple(listed_for(view, shape[3]) for view in views), as_rows(q)
    keep, left = chosen(views, energies(q, views, means, rule, place), rule, place)
    grid = (place.lead, rule.width)
    parts = [tiles.attend_blocks(q, view, kept, *grid, rule.block) for view, kept in zip(views, keep, strict=True)]
    if rule.correction:
        weight = [jnp.where(out, math.log(rule.block), -jnp.inf) for out in left]
        parts += [tiles.attend_means(q, view, mean, bias, *grid) for view, mean, bias in zip(views, means, weight, strict=True)]
    out, lse = merge(parts)
    if rule.apart:
        out, lse = (jnp.moveaxis(x.reshape(shape[0], shape[3], shape[1], shape[2], *x.shape[4:]), 1, 3) for x in (out, lse))
    return out, lse


def reader(rule: Rule) -> Attend:
    """Hooks.attend: dense where every tile of the call reads everything, else by blocks."""

    def attend(q: Array, views: tuple[AttentionView, ...], rows: Rows) -> Seen:
        for view in views:
            odd = view.first is not None or view.bias is not None or view.window is not None or view.pos is not None
            check(
                not odd, "flashprefill with a method that masks a prompt's tokens itself: blocks have no place for its mask; use it alone"
            )
        place = tiling(rule, q.shape[1], rows)

        def by_blocks() -> Seen:
            out, lse = read_blocks(rule, q, views, rows)
            # Attention that tokens receive is known only of queries that read everything.
            tile = (place.lead[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)) // rule.width
            real = jnp.take_along_axis(place.whole, tile, axis=1) & (jnp.arange(q.shape[1]) < rows.count[:, None])
            return Seen(out, lse, tuple(mass(q, view, lse, real) if view.mass else None for view in views))

        touched = jnp.arange(place.whole.shape[1]) * rule.width < (place.lead + rows.count)[:, None]
        return lax.cond(jnp.any(~place.whole & touched), by_blocks, lambda: attention(q, views, rows.count))

    return attend


ALPHAS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
"""What `calibrate` tries."""


def read_shares(qkv: Qkv, rule: Rule) -> np.ndarray:
    """[ALPHAS, 2]: of what a layer's tiles could leave out, the share of its attention and of its blocks that they read.

    Memory: logits of 16 tiles against the whole text, 4 bytes a query row and token.
    """
    length, size = qkv.k.shape[1], rule.block
    pool = lambda x: jnp.moveaxis(jnp.pad(x[0], [(0, -length % size), (0, 0), (0, 0)]).reshape(-1, size, *x.shape[2:]), 2, 1)  # noqa: E731
    one, zero = jnp.full(1, length, jnp.int32), jnp.zeros(1, jnp.int32)
    k = pool(qkv.k)
    view = AttentionView(k, pool(qkv.v), jnp.arange(len(k), dtype=jnp.int32)[None], one, own=one, run=size)
    place = tiling(rule, length, Rows(zero, zero, one, view.ids, zero[:, None]))
    q, means, group = qkv.q, [tiles.block_means(view, size)], qkv.q.shape[3]
    if rule.apart:
        place, means = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), (place, means))
        q, view = as_rows(q), listed_for(view, group)
    energy = energies(q, (view,), means, rule, place)
    asked = tiles.split(q, place.lead, rule.width)
    received = []
    for at in range(0, asked.shape[1], tiles.TOGETHER):
        part = asked[:, at : at + tiles.TOGETHER].astype(jnp.float32)
        logits = jnp.einsum("rnthgd,bhsd->rnhtgbs", part, k.astype(jnp.float32)) * part.shape[-1] ** -0.5
        query = (at + jnp.arange(part.shape[1]))[:, None] * rule.width + jnp.arange(rule.width)
        seen = jnp.arange(len(k) * size).reshape(len(k), size) <= query[:, None, :, None, None, None]
        weight = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=(-2, -1))
        received.append(jnp.sum(weight, axis=(3, 4, 6)))
    attention_ = np.asarray(jnp.concatenate(received, axis=1))
    decided = np.asarray(chosen((view,), energy, rule._replace(alpha=2.0), place)[1][0])  # nothing can be twice the best
    found = []
    for alpha in ALPHAS:
        read = decided & np.asarray(chosen((view,), energy, rule._replace(alpha=alpha), place)[0][0])
        found.append((attention_[read].sum() / attention_[decided].sum(), read.sum() / decided.sum()))
    return np.asarray(found)


def calibrate(
    trace: Callable[[Any], Any],
    texts: Sequence[Sequence[int]],
    *,
    recall: float = 0.9,
    block: int = 128,
    tile: int = 128,
    sinks: int = 2,
    window: int = 4,
    per_query_head: bool = False,
) -> dict[str, Any]:
    """The largest alpha with which tiles still read enough, mean over layers and texts.

    recall: share of the attention on blocks that may be left out which must be read; the others as in the method. trace, texts: see
    methods.calibration. Pieces too short to leave a block out are not counted.
    """
    check(0 < recall <= 1, f"recall={recall} must lie in (0, 1]: the share of attention that must be read")
    shortest = (sinks + window + 2) * block
    long = [ids for ids in texts if len(ids) >= shortest]
    check(bool(long), f"texts has no piece of {shortest} tokens, too few to leave a block out; give longer texts and --length")
    found = []
    for ids in long:
        for spec, qkv in trace(ids):
            width = max(1, tile if per_query_head else tile // spec.group)
            found.append(read_shares(qkv, Rule(0.0, block, width, sinks, window, 0, 0, per_query_head, True)))
    attended, blocks = np.mean(found, axis=0).T
    enough = np.flatnonzero(attended >= recall)
    check(len(enough) > 0, f"recall={recall}: even alpha={ALPHAS[0]} reads {attended[0]:.3f} only; ask for less")
    best = int(enough[-1])
    shares = {"recall": round(float(attended[best]), 4), "blocks": round(float(blocks[best]), 4)}
    return {"alpha": ALPHAS[best]} | shares | {"block": block, "tile": tile, "tokens": sum(map(len, long))}


def flashprefill(
    alpha: float,
    block: int = 128,
    tile: int = 128,
    sinks: int = 2,
    window: int = 4,
    last: int = 8,
    shortest: int = 4096,
    correction: bool = True,
    per_query_head: bool = False,
    page: int | None = None,
) -> Method:
    """Prefill long prompts sparsely: each tile of queries reads the blocks of keys whose mean key it looks at.

    S_b = sum over the tile's queries and the group of exp(q . mean(K_b) / sqrt(D)), b whole and before the tile; read b if
    S_b >= alpha max S, or b is one of the `sinks` first or of the `window` last. A block that is left out counts as `block`
    tokens with its mean key and mean value.

    Family: prefill
    Paper: FlashPrefill, version 2, arXiv 2608.19758 (qhfan/FlashPrefill); per_query_head=true,correction=false is version 1.
    Differs: a tile holds tile // group positions (version 2 packs rows even where the group does not divide the tile), and a tile
        that a chunk's end cuts is two. Tokens kept from earlier turns form blocks of their own, before the prompt's.
    Keeps: what the method it is combined with keeps, as in "flashprefill:alpha=0.1 + snapkv"; alone every token. Decode steps do not
        change. A rule that ranks by received attention sees that of the queries that read everything (the last tiles).

    Args:
        alpha: share of the best block's score that a block needs to be read, 0 (all) to 1; `sejax calibrate` measures it for a model.
        block: tokens of a block of keys, a multiple of the page.
        tile: query rows (positions times query heads of a kv head) that choose together.
        sinks: first blocks that are always read.
        window: last blocks, up to the tile's own, that are always read.
        last: tiles at the prompt's end that read everything.
        shortest: prompts of at most this many new tokens are read as a whole.
        correction: whether the blocks left out count by their means.
        per_query_head: whether each query head chooses for itself, by tiles of `tile` positions.
        page: tokens a page of the pool, where it is used alone (default 16, or what divides the block).
    """
    check(0 <= alpha <= 1, f"alpha={alpha} must lie between 0 and 1; 0 reads everything")
    page = math.gcd(block, 16) if page is None else page
    check(page >= 1 and block >= page and block % page == 0, f"block={block} must be a multiple of page={page}")
    check(tile >= 1, f"tile={tile} must be at least 1 query row; the usual value is 128")
    check(sinks >= 0 and last >= 0 and shortest >= 0, f"sinks={sinks}, last={last} and shortest={shortest} must be >= 0")
    check(window >= 1, f"window={window} must be at least 1: a tile reads the block it lies in")
    arguments = dict(alpha=alpha, block=block, tile=tile, sinks=sinks, window=window, last=last, shortest=shortest)
    arguments |= dict(correction=correction, per_query_head=per_query_head, page=page)

    def attend(spec: LayerSpec, page: int) -> Attend:
        check(block % page == 0, f"flashprefill: block={block} must be a multiple of the other method's page={page}; change one of them")
        width = max(1, tile if per_query_head else tile // spec.group)
        return reader(Rule(alpha, block, width, sinks, window, last, shortest, per_query_head, correction))

    return read_by(attend, composed("flashprefill", arguments, raw(page)), "flashprefill", arguments)
