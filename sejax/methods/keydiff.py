"""Keep the keys that differ most from the mean direction: no query is needed."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from sejax.cache.method import check, composed, either
from sejax.cache.retention import LOCAL_SETS, Candidates, Retention, amount, default_slack
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method


def unlike(keys: Array, real: Array) -> Array:
    """-cos of each key with the mean of the unit keys that are real: [R,H,C,D], bool[R,H,C] -> f32[R,H,C]."""
    keys = keys.astype(jnp.float32)
    unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
    anchor = jnp.sum(jnp.where(real[..., None], unit, 0), axis=2) / jnp.maximum(jnp.sum(real, axis=2), 1)[..., None]
    anchor /= jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
    return -jnp.einsum("rhcd,rhd->rhc", unit, anchor)


def by_block(keys: Array, total: Array, budget: int, block: int) -> Array:
    """The first `budget` candidates, then block after block the best of (kept and block): 1.0 for what is left, else 0.0."""
    rank = jnp.arange(keys.shape[2], dtype=jnp.int32)
    at_row, at_head = jnp.ogrid[: keys.shape[0], : keys.shape[1]]

    def step(i: Array, kept: Array) -> Array:
        first = budget + i * block
        real = kept | ((rank >= first) & (rank < jnp.minimum(first + block, total[..., None])))
        _, best = lax.top_k(jnp.where(real, unlike(keys, real), -jnp.inf), min(budget, rank.shape[0]))
        return jnp.zeros_like(kept).at[at_row[..., None], at_head[..., None], best].set(True)

    start = jnp.broadcast_to(rank < budget, keys.shape[:3])
    blocks = -(-jnp.maximum(jnp.max(total) - budget, 0) // block)
    return lax.fori_loop(0, blocks, step, start).astype(jnp.float32)


def score(candidates: Candidates, budget: int, block: int | None) -> Array:
    """Candidates -> f32[R,H,C]."""
    assert candidates.read is not None
    keys = candidates.read("keys")
    if block is not None:
        return by_block(keys, candidates.total, budget, block)
    return unlike(keys, jnp.arange(keys.shape[2]) < candidates.total[..., None])


def keydiff(
    budget: int | None = None, block: int | None = None, slack: int | None = None, ratio: float | None = None, page: int = 16
) -> Method:
    """Keep the tokens whose keys are least like the average key.

    score_j = -cos(k_j, mean_i k_i / |k_i|), over all candidates.

    Family: eviction
    Paper: Park et al. 2025, arXiv 2504.15364.
    Differs: one decision over the whole prompt; `block=128` decides block by block as the paper does (attention inside the
        prompt stays dense in both). A run has `slack` rows beyond the budget before the next decision.
    Keeps: budget tokens per kv head and layer after a seal, at most budget + slack.

    Args:
        budget: tokens kept per kv head and layer (default 4096, where ratio is not given).
        block: tokens that arrive together, none for the whole prompt at once.
        slack: tokens a run holds beyond its budget (default max(1024, budget / 4)); 1 seals at every turn.
        ratio: instead of a budget: the fraction of the session's tokens that is kept, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 4096)
    slack = default_slack(budget) if slack is None else slack
    check(block is None or block >= 1, f"block={block} must be at least 1 token, or none for the whole prompt")
    check(block is None or ratio is None, f"block={block} compares blocks with what a budget keeps; give budget instead of ratio={ratio}")
    check(slack >= 1, f"slack={slack} must be at least 1")

    def retention(spec: LayerSpec) -> Retention:
        most, at = amount(budget, ratio, spec)
        return Retention(most, slack, 0, lambda c: score(c, most, block), budget_at=at)

    arguments = dict(budget=budget, block=block, slack=slack, ratio=ratio, page=page)
    return composed("keydiff", arguments, raw(page), retention, refuses=LOCAL_SETS)
