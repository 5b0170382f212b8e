"""Keep everything, read the pages that may hold the largest logits."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from sejax.cache.method import check, composed
from sejax.cache.retention import over_heads
from sejax.cache.selection import Picked, Selection
from sejax.cache.storage import Leaves, raw
from sejax.kernels import pages as kernel
from sejax.kernels.rows import head_pages
from sejax.types import Array, LayerSpec, Method


def enough(scores: Array, chosen: Array, top_p: float) -> Array:
    """Those of the pages chosen i32[R,H,k] that are needed to reach top_p of softmax(scores f32[R,H,M]), best first; tail M."""
    pages = scores.shape[-1]
    weight = jax.nn.softmax(jnp.maximum(scores, jnp.finfo(jnp.float32).min), axis=-1)
    weight = jnp.where(chosen < pages, jnp.take_along_axis(weight, jnp.minimum(chosen, pages - 1), axis=-1), -1.0)
    order = jnp.argsort(-weight, axis=-1, stable=True)
    ranked = jnp.take_along_axis(weight, order, axis=-1)
    needed = jnp.cumsum(ranked, axis=-1) - ranked < top_p
    return jnp.sort(jnp.where(needed, jnp.take_along_axis(chosen, order, axis=-1), pages), axis=-1)


def pages_read(q: Array, low: Array, high: Array, table: Array, n: Array, budget: int, page: int, heads: str, top_p: float = 1.0) -> Picked:
    """The budget / page pages to read: the last one and the best others by upper bound, as many as top_p needs.

    q [R,H,G,D]; low, high [N,H,D]; table i32[R,M] pages or i32[R,H,M] head pages; n i32[R,H] rows held.
    """
    others = jnp.maximum(-(-n // page) - 1, 0)  # pages before the last in use
    scores = kernel.page_scores(q, low, high, table, others)
    if heads == "shared":
        scores = over_heads(scores, "max")
    if top_p == 1:
        entry, length = kernel.listed(scores, budget // page - 1, table, n, page)
    else:
        chosen = enough(scores * q.shape[-1] ** -0.5, kernel.select(scores, budget // page - 1), top_p)
        entry, length = kernel.listing(chosen, table, n, page)
    return Picked(entry, page, length)


def quest(
    budget: int = 2048,
    page: int = 16,
    dense_layers: int = 2,
    heads: Literal["each", "shared"] = "each",
    top_p: float = 1.0,
) -> Method:
    """Read the pages whose key bounds allow the largest logits for this query.

    score(page) = max over the group of sum_d max(q_d hi_d, q_d lo_d), hi and lo the page's channel-wise key bounds;
    read the best budget / page - 1 pages and the last one.

    Family: selection
    Paper: Tang et al. 2024, arXiv 2406.10774.
    Differs: one page list per kv head (largest over the group) instead of one per query head. The last page is always
        read and never scored (as in the paper's kernels). No minimum of three pages. `top_p` reads fewer pages where attention is
        peaked, as Lin et al. 2025 (Twilight, arXiv 2502.02770) do by token: the best whose share of softmax(score / sqrt(D)) over
        all pages reaches it.
    Keeps: every token; a decode step reads at most `budget` tokens per kv head and layer. Prefill and the first layers are dense.

    Args:
        budget: tokens read per kv head and layer in a decode step, a multiple of `page`.
        page: tokens a page, of the pool and of the bounds.
        dense_layers: first layers that read everything.
        heads: "each" kv head its own pages; "shared": one list, the largest score over all heads.
        top_p: share of the pages' weights that is enough, 0 to 1; with less than 1, budget is a cap.
    """
    check(page >= 1, f"page={page} must be at least 1 token; the usual value is 16")
    nearest = max(1, round(budget / page)) * page
    check(budget >= page and budget % page == 0, f"budget={budget} must be a multiple of page={page}; use {nearest}")
    check(0 < top_p <= 1, f"top_p={top_p} must lie in (0, 1]; 1 reads budget tokens")
    check(dense_layers >= 0, f"dense_layers={dense_layers} must be >= 0")
    check(heads in ("each", "shared"), f'heads={heads!r} must be "each" or "shared"')

    def selection(spec: LayerSpec) -> Selection | None:
        return bounds(budget, page, heads, top_p) if spec.index >= dense_layers else None

    arguments = dict(budget=budget, page=page, dense_layers=dense_layers, heads=heads, top_p=top_p)
    return composed("quest", arguments, raw(page), selection=selection)


def bounds(budget: int, page: int, heads: str, top_p: float = 1.0) -> Selection:
    """The index: channel-wise bounds [N,H,D] of every page, kept with the page, so that they travel with it."""

    def applies(spec: LayerSpec, rows: int) -> bool:
        return rows > budget or top_p < 1

    def init(spec: LayerSpec, pages: int) -> Leaves:
        shape = (pages, spec.heads, spec.head_dim)
        return {"low": jnp.zeros(shape, spec.dtype), "high": jnp.zeros(shape, spec.dtype)}

    def observe(leaves: Leaves, table: Array, row: Array, keys: Array) -> Leaves:
        low, high = kernel.append_bounds(leaves["low"], leaves["high"], keys, table, row, page)
        return {"low": low, "high": high}

    def rebuild(leaves: Leaves, table: Array, n: Array, keys: Array) -> Leaves:
        rows, heads_, held, dim = keys.shape
        real = (jnp.arange(held) < n[..., None]).reshape(rows, heads_, -1, page)
        low, high = kernel.page_bounds(keys.reshape(rows, heads_, -1, page, dim), real, leaves["low"].dtype)
        at = head_pages(table, heads_)
        return {"low": leaves["low"].at[at].set(low, mode="drop"), "high": leaves["high"].at[at].set(high, mode="drop")}

    def pick(leaves: Leaves, q: Array, table: Array, n: Array) -> Picked:
        return pages_read(q, leaves["low"], leaves["high"], table, n, budget, page, heads, top_p)

    return Selection(page, applies, init, observe, rebuild, pick)
