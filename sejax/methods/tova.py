"""Drop, at every step, the token that the newest query attends to least."""

from __future__ import annotations

import jax.numpy as jnp

from sejax.cache.method import check, composed, either
from sejax.cache.retention import UNREAD, Candidates, Retention, amount, over_heads
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method


def score(candidates: Candidates, protect_last: bool) -> Array:
    """The newest query's attention, mean over all query heads: Candidates -> f32[R,H,C]."""
    assert candidates.mass is not None
    seen = over_heads(candidates.mass.mean(axis=2), "mean")
    if protect_last:
        seen = jnp.where(jnp.arange(seen.shape[-1]) == candidates.total[..., None] - 1, jnp.inf, seen)
    return seen


def tova(budget: int | None = None, period: int = 1, protect_last: bool = False, ratio: float | None = None, page: int = 16) -> Method:
    """Keep the tokens that the newest query attends to; one set for all heads of a layer.

    score_j = mean over all query heads of softmax(q_newest K^T / sqrt(D))_j

    Family: eviction
    Paper: Oren et al. 2024, arXiv 2401.06104.
    Differs: a prompt is attended to as a whole and trimmed at its end by its last query.
    Keeps: budget tokens per kv head and layer after a prompt or trim, at most budget + period - 1 between steps.

    Args:
        budget: tokens kept per layer, the same in all kv heads (default 4096, where ratio is not given).
        period: decoded tokens between trims (1 is the paper); 0: none while decoding, a run then has room for the longest sequence.
        protect_last: whether the newest token always stays (the paper may drop it at once).
        ratio: instead of a budget: the fraction of the session's tokens that is kept, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 4096)
    check(period >= 0, f"period={period} must be at least 1 step, or 0 for none")

    def retention(spec: LayerSpec) -> Retention:
        most, at = amount(budget, ratio, spec)
        return Retention(most, max(period, 1), 1, lambda c: score(c, protect_last), budget_at=at, endless=period == 0)

    arguments = dict(budget=budget, period=period, protect_last=protect_last, ratio=ratio, page=page)
    return composed("tova", arguments, raw(page), retention, refuses=UNREAD)
