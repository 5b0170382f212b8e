"""Page bounds, page scores and k-best selection (Quest: Tang et al. 2024, arXiv 2406.10774).

Bounds of a page are the channel-wise minimum and maximum of its real keys as stored: [N,H,D] each, in the keys' type or in one of
8 bits rounded outward, so that a score stays an upper bound.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from sejax.kernels import dispatch
from sejax.kernels.rounding import outward
from sejax.kernels.rows import head_pages, spots
from sejax.types import Array


@dispatch.append_bounds
def append_bounds(low: Array, high: Array, k: Array, table: Array, row: Array, page: int) -> tuple[Array, Array]:
    """Widen the bounds of the pages that new keys fall into; a page's first token resets them.

    low, high [N,H,D]; k [R,T,H,D] of the token rows i32[R,T,H] (negative: none); table as in `rows.spots`, of `page` tokens a page.
    """
    pages, heads = low.shape[:2]
    at, head, offset = spots((pages, heads, page), table, jnp.swapaxes(row, 1, 2))
    opened = jnp.where(offset == 0, at, pages)
    k = jnp.swapaxes(k, 1, 2).astype(jnp.float32)
    least, most = outward(k, low.dtype, False).astype(low.dtype), outward(k, high.dtype, True).astype(high.dtype)
    limit = float(jnp.finfo(low.dtype).max)
    low = low.at[opened, head].set(limit, mode="drop").at[at, head].min(least, mode="drop")
    high = high.at[opened, head].set(-limit, mode="drop").at[at, head].max(most, mode="drop")
    return low, high


def page_bounds(k: Array, real: Array, dtype: Any = None) -> tuple[Array, Array]:
    """Bounds from keys laid out by page: k [...,P,D], real bool[...,P] -> two [...,D] in `dtype` (k's if None); an empty page gets 0, 0."""
    some = jnp.any(real, axis=-1)[..., None]
    low = jnp.min(jnp.where(real[..., None], k, jnp.inf), axis=-2)
    high = jnp.max(jnp.where(real[..., None], k, -jnp.inf), axis=-2)
    dtype = dtype or k.dtype
    low, high = (outward(x.astype(jnp.float32), dtype, up).astype(dtype) for x, up in ((low, False), (high, True)))
    return jnp.where(some, low, 0), jnp.where(some, high, 0)


@dispatch.page_scores
def page_scores(q: Array, low: Array, high: Array, ids: Array, count: Array) -> Array:
    """Upper bound of any logit in each page, unscaled, the largest over the query heads of a kv head.

    q [R,H,G,D]; low, high [N,H,D]; ids i32[R,M] pages or i32[R,H,M] head pages; count i32[R,H] pages to score -> f32[R,H,M],
    -inf beyond.
    """

    def listed(leaf: Array) -> Array:
        """[N,H,D] -> [R,H,M,D]; whole pages where all heads list the same."""
        if ids.ndim == 2:
            return jnp.swapaxes(leaf.at[ids].get(mode="clip"), 1, 2).astype(q.dtype)
        return leaf.at[head_pages(ids, leaf.shape[1])].get(mode="clip").astype(q.dtype)

    up, down = jnp.maximum(q, 0), jnp.minimum(q, 0)  # sum_d max(q hi, q lo) = up . hi + down . lo
    score = jnp.einsum("rhgd,rhmd->rhgm", up, listed(high), preferred_element_type=jnp.float32)
    score += jnp.einsum("rhgd,rhmd->rhgm", down, listed(low), preferred_element_type=jnp.float32)
    real = jnp.arange(ids.shape[-1]) < count[..., None]
    return jnp.where(real, jnp.max(score, axis=2), -jnp.inf)


@dispatch.select
def select(scores: Array, k: int) -> Array:
    """Indices of the k best scores, ties to the lowest index, ascending. f32[...,M] -> i32[...,k].

    -inf scores are never chosen: the tail of a row with fewer candidates is M.
    """
    width = scores.shape[-1]
    best, at = lax.top_k(scores, min(k, width))
    at = jnp.sort(jnp.where(best == -jnp.inf, width, at).astype(jnp.int32), axis=-1)
    if k > width:
        at = jnp.pad(at, [(0, 0)] * (at.ndim - 1) + [(0, k - width)], constant_values=width)
    return at


@dispatch.listed
def listed(scores: Array, k: int, table: Array, n: Array, page: int) -> tuple[Array, Array]:
    """The k best pages of each head and its last one, as a list to attend to.

    scores f32[R,H,M] of the pages before the last, -inf beyond; table i32[R,M] or i32[R,H,M]; n i32[R,H] rows held, `page` a page.
    Returns head pages i32[R,H,k+1] ascending (behind the list: any), and the tokens listed i32[R,H].
    """
    return listing(select(scores, k), table, n, page)


def listing(chosen: Array, table: Array, n: Array, page: int) -> tuple[Array, Array]:
    """`listed` of pages that are chosen: i32[R,H,k] ascending, tail M."""
    pages, heads = table.shape[-1], n.shape[1]
    others = jnp.maximum(-(-n // page) - 1, 0)
    found = jnp.sum(chosen < pages, axis=-1)
    # The last page goes right behind the chosen ones: the list stays ascending, and its end may be partial.
    chosen = jnp.pad(chosen, [(0, 0), (0, 0), (0, 1)], constant_values=pages)
    chosen = jnp.where(jnp.arange(chosen.shape[-1]) == found[..., None], others[..., None], chosen)
    at_page, head = head_pages(table, heads)
    entry = jnp.take_along_axis(at_page * heads + head, jnp.clip(chosen, 0, pages - 1), axis=-1)
    return entry, jnp.where(n > 0, found * page + n - others * page, 0).astype(jnp.int32)
