"""Keep the prompt tokens that the end of the prompt looks at."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from sejax.cache.method import check, composed, either
from sejax.cache.retention import LOCAL_SETS, Candidates, Retention, amount, default_slack, over_heads, pool
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method


def by_chunk(scores: Array, valid: Array, chunk: int) -> Array:
    """The mean of `chunk` candidates in a row, for each of them: f32[R,H,C], valid bool[R,H,C] those that count."""
    *outer, width = scores.shape
    pad = [(0, 0), (0, 0), (0, -width % chunk)]
    sums, counts = (jnp.pad(x, pad).reshape(*outer, -1, chunk).sum(-1) for x in (jnp.where(valid, scores, 0.0), valid))
    return jnp.repeat(sums / jnp.maximum(counts, 1), chunk, axis=-1)[..., :width]


def score(candidates: Candidates, sinks: int, kernel: int, pooling: str, heads: str, chunk: int | None = None) -> Array:
    """Pooled window attention of each candidate, +inf for sinks and the window: Candidates -> f32[R,H,C]."""
    assert candidates.mass is not None
    seen = candidates.mass.max(axis=2) if heads == "shared" else candidates.mass.mean(axis=2)
    if heads == "shared":
        seen = over_heads(seen, "max")
    rank = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    before_window = rank < (candidates.total - candidates.window[:, None])[..., None]
    pooled = by_chunk(seen, before_window, chunk) if chunk else pool(seen, before_window, kernel, pooling)
    return jnp.where(before_window & (rank >= sinks), pooled, jnp.inf)


def snapkv(
    budget: int | None = None,
    window: int = 32,
    kernel: int = 7,
    pooling: Literal["avg", "max"] = "max",
    sinks: int = 0,
    slack: int | None = None,
    heads: Literal["each", "shared"] = "each",
    chunk: int | None = None,
    ratio: float | None = None,
    page: int = 16,
) -> Method:
    """Keep the tokens that the last queries of the prompt attend to, and those last tokens.

    s_j = pool_kernel( mean over the group of sum over the last `window` queries of softmax(q K^T / sqrt(D))_j );
    keep the budget - window best j before the window, and the window.

    Family: eviction
    Paper: Li et al. 2024, arXiv 2404.14469; with `chunk` ChunkKV, Liu et al. 2025, arXiv 2502.00299.
    Differs: one set per kv head (the group's mean, before pooling) instead of one per query head. A run has `slack` rows
        beyond the budget: decoded and later prompt tokens fill them, and the next seal or trim, scored by the latest
        queries, comes when they are full (the paper never evicts again).
    Keeps: budget tokens per kv head and layer after a seal, at most budget + slack.

    Args:
        budget: tokens kept per kv head and layer, window and sinks included (default 4096, where ratio is not given).
        window: observation window, queries at the end of the prompt (fewer if the prompt is shorter).
        kernel: pooling width in tokens, odd; 1 does not pool.
        pooling: "max" (paper's experiments) or "avg" (padding zeros counted).
        sinks: first tokens that are always kept.
        slack: tokens a run holds beyond its budget (default max(1024, budget / 4)); 1 seals at every turn.
        heads: "each" kv head its own set; "shared": one set, the largest score over all heads.
        chunk: tokens that are kept or dropped together: each gets the mean of its chunk, in place of pooling. The last chunk may be
            cut where the budget ends.
        ratio: instead of a budget: the fraction of the session's tokens that is kept, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 4096)
    slack = default_slack(budget) if slack is None else slack
    check(window >= 1, f"window={window}: snapkv needs at least 1 observed query; the usual value is 32")
    short = f"budget={budget} leaves nothing beside window={window} and sinks={sinks}; give a larger budget"
    check(budget is None or budget > window + sinks, short)
    check(chunk is None or chunk >= 1, f"chunk={chunk} must be at least 1 token, or none for single tokens")
    whole = chunk is None or budget is None or ((budget - window) % chunk == 0 and sinks % chunk == 0)
    check(whole, f"budget={budget} minus window={window}, and sinks={sinks}, must be multiples of chunk={chunk}, which is kept as a whole")
    check(kernel >= 1 and kernel % 2 == 1, f"kernel={kernel} must be odd: an even width would shift the scores; use {kernel + 1}")
    check(pooling in ("avg", "max"), f'pooling={pooling!r} must be "avg" or "max"')
    check(heads in ("each", "shared"), f'heads={heads!r} must be "each" or "shared"')
    check(sinks >= 0 and slack >= 1, f"sinks={sinks} must be >= 0 and slack={slack} >= 1")
    arguments = dict(budget=budget, window=window, kernel=kernel, pooling=pooling, sinks=sinks, slack=slack, heads=heads)
    arguments |= dict(chunk=chunk, ratio=ratio, page=page)

    def retention(spec: LayerSpec) -> Retention:
        most, at = amount(budget, ratio, spec)
        return Retention(most, slack, window, lambda c: score(c, sinks, kernel, pooling, heads, chunk), budget_at=at)

    return composed("snapkv", arguments, raw(page), retention, refuses=LOCAL_SETS)
