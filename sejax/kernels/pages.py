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
from sejax.kernels.rows import head_pages
from sejax.types import Array


@dispatch.append_bounds
def append_bounds(low: Array, high: Array, k: Array, page: Array, offset: Array, head: Array | None = None) -> tuple[Array, Array]:
    """Widen the bounds of the pages that new keys fall into; a page's first token resets them.

    low, high [N,H,D]; k [R,T,H,D]; page, offset i32[R,T,H] (page N: dropped), head: the head slice, where it is not the key's own.
    """
    head = jnp.arange(low.shape[1]) if head is None else head
    opened = jnp.where(offset == 0, page, low.shape[0])
    k = k.astype(jnp.float32)
    least, most = outward(k, low.dtype, False).astype(low.dtype), outward(k, high.dtype, True).astype(high.dtype)
    limit = float(jnp.finfo(low.dtype).max)
    low = low.at[opened, head].set(limit, mode="drop").at[page, head].min(least, mode="drop")
    high = high.at[opened, head].set(-limit, mode="drop").at[page, head].max(most, mode="drop")
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
