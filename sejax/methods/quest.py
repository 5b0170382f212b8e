"""Keep everything, read the pages that may hold the largest logits."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from sejax.cache.method import check, composed
from sejax.cache.retention import over_heads
from sejax.cache.selection import Picked, Selection
from sejax.cache.storage import Leaves, raw
from sejax.kernels import pages as kernel
from sejax.kernels.rows import locate
from sejax.types import Array, LayerSpec, Method


def pages_read(q: Array, low: Array, high: Array, table: Array, n: Array, budget: int, page: int, heads: str) -> Picked:
    """The budget / page pages to read: the last one and the best others by upper bound.

    q [R,H,G,D]; low, high [N,H,D]; table i32[R,M]; n i32[R,H] rows held.
    """
    count = -(-n // page)  # pages in use
    others = jnp.maximum(count - 1, 0)
    scores = kernel.page_scores(q, low, high, table, others)
    if heads == "shared":
        scores = over_heads(scores, "max")
    chosen = kernel.select(scores, budget // page - 1)  # i32[R,H,k], tail = M
    found = jnp.sum(chosen < table.shape[1], axis=-1)
    # The last page goes right behind the chosen ones: the list stays ascending, and its end may be partial.
    chosen = jnp.pad(chosen, [(0, 0), (0, 0), (0, 1)], constant_values=table.shape[1])
    chosen = jnp.where(jnp.arange(chosen.shape[-1]) == found[..., None], others[..., None], chosen)
    entry = jnp.take_along_axis(table[:, None, :], jnp.clip(chosen, 0, table.shape[1] - 1), axis=-1)
    head = jnp.arange(low.shape[1], dtype=jnp.int32)[:, None]
    length = jnp.where(n > 0, found * page + n - others * page, 0)
    return Picked(entry * low.shape[1] + head, page, length.astype(jnp.int32))


def quest(
    budget: int = 2048,
    page: int = 16,
    dense_layers: int = 2,
    heads: Literal["each", "shared"] = "each",
) -> Method:
    """Read the pages whose key bounds allow the largest logits for this query.

    score(page) = max over the group of sum_d max(q_d hi_d, q_d lo_d), hi and lo the page's channel-wise key bounds;
    read the best budget / page - 1 pages and the last one.

    Family: selection
    Paper: Tang et al. 2024, arXiv 2406.10774.
    Differs: one page list per kv head (largest over the group) instead of one per query head. The last page is always
        read and never scored (as in the paper's kernels). No minimum of three pages.
    Keeps: every token; a decode step reads `budget` tokens per kv head and layer. Prefill and the first layers are dense.

    Args:
        budget: tokens read per kv head and layer in a decode step, a multiple of `page`.
        page: tokens a page, of the pool and of the bounds.
        dense_layers: first layers that read everything.
        heads: "each" kv head its own pages; "shared": one list, the largest score over all heads.
    """
    check(page >= 1, f"page={page} must be at least 1 token; the usual value is 16")
    nearest = max(1, round(budget / page)) * page
    check(budget >= page and budget % page == 0, f"budget={budget} must be a multiple of page={page}; use {nearest}")
    check(dense_layers >= 0, f"dense_layers={dense_layers} must be >= 0")
    check(heads in ("each", "shared"), f'heads={heads!r} must be "each" or "shared"')

    def selection(spec: LayerSpec) -> Selection | None:
        return bounds(budget, page, heads) if spec.index >= dense_layers else None

    return composed("quest", dict(budget=budget, page=page, dense_layers=dense_layers, heads=heads), raw(page), selection=selection)


def bounds(budget: int, page: int, heads: str) -> Selection:
    """The index: channel-wise bounds [N,H,D] of every page, kept with the page, so that they travel with it."""

    def applies(spec: LayerSpec, rows: int) -> bool:
        return rows > budget

    def init(spec: LayerSpec, pages: int) -> Leaves:
        shape = (pages, spec.heads, spec.head_dim)
        return {"low": jnp.zeros(shape, spec.dtype), "high": jnp.zeros(shape, spec.dtype)}

    def observe(leaves: Leaves, table: Array, row: Array, keys: Array) -> Leaves:
        at_page, offset = locate(table, row, page, leaves["low"].shape[0])
        low, high = kernel.append_bounds(leaves["low"], leaves["high"], keys, at_page, offset)
        return {"low": low, "high": high}

    def rebuild(leaves: Leaves, table: Array, n: Array, keys: Array) -> Leaves:
        rows, heads_, held, dim = keys.shape
        real = (jnp.arange(held) < n[..., None]).reshape(rows, heads_, -1, page)
        low, high = kernel.page_bounds(keys.reshape(rows, heads_, -1, page, dim), real)
        head = jnp.arange(heads_)[:, None]
        return {
            "low": leaves["low"].at[table[:, None, :], head].set(low, mode="drop"),
            "high": leaves["high"].at[table[:, None, :], head].set(high, mode="drop"),
        }

    def pick(leaves: Leaves, q: Array, table: Array, n: Array) -> Picked:
        return pages_read(q, leaves["low"], leaves["high"], table, n, budget, page, heads)

    return Selection(page, applies, init, observe, rebuild, pick)
