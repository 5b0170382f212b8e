"""Keep the tokens that received the most attention so far, and the recent ones."""

from __future__ import annotations

import jax.numpy as jnp

from sejax.cache.method import check, composed, either
from sejax.cache.retention import UNREAD, Candidates, Retention, amount
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method

SCORED = ("reading", "cuts between chunks rank by the attention of all queries, which a sparse prompt lacks; leave out prefill_budget")


def group_mean(mass: Array) -> Array:
    """What a call adds to each row's score: f32[R,H,G,C] -> f32[R,H,C]."""
    return mass.mean(axis=2)


def score(candidates: Candidates, recent: Array | int, normalise: bool) -> Array:
    """Attention received since a token arrived, +inf for the last `recent`: Candidates -> f32[R,H,C]."""
    assert candidates.read is not None and candidates.length is not None
    received = candidates.read("score")
    if normalise:  # by the number of queries that could see the token
        received = received / jnp.maximum(candidates.length[:, None, None] - candidates.read("pos"), 1)
    rank = jnp.arange(received.shape[-1], dtype=jnp.int32)
    return jnp.where(rank < candidates.total[..., None] - recent, received, jnp.inf)


def h2o(
    budget: int | None = None,
    recent: int | None = None,
    period: int = 128,
    normalise: bool = False,
    prefill_budget: int | None = None,
    ratio: float | None = None,
    page: int = 16,
) -> Method:
    """Keep heavy hitters: tokens whose summed attention over all queries so far is largest, beside the most recent tokens.

    score_j = sum over every query since j arrived of the mean over the group of softmax(q K^T / sqrt(D))_j

    Family: eviction
    Paper: Zhang et al. 2023, arXiv 2306.14048.
    Differs: one set per kv head (the group's mean). Decoding trims every `period` tokens, not at each (1 is the paper); the
        prompt is attended to as a whole and trimmed at its end, or, with `prefill_budget`, also after each of its chunks, so that
        a long prompt costs linear time; then the answer depends on the chunks' size.
    Keeps: budget tokens per kv head and layer after a prompt or trim, at most budget + period.

    Args:
        budget: tokens kept per kv head and layer, recent ones included (default 4096, where ratio is not given).
        recent: latest tokens that are always kept (default half of what is kept).
        period: decoded tokens between trims; 0: none while decoding, a run then has room for the longest sequence.
        normalise: whether a score is divided by the number of queries that could see the token: without it early tokens win.
        prefill_budget: tokens of a prompt kept per kv head between its chunks, recent ones included, as in 8192; none: all.
        ratio: instead of a budget: the fraction of the session's tokens that is kept, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 4096)
    recent = budget // 2 if recent is None and budget is not None else recent
    check((recent or 0) >= 0 and (budget is None or budget > (recent or 0)), f"budget={budget} must be larger than recent={recent} >= 0")
    check(period >= 0, f"period={period} must be at least 1 step, or 0 for none")
    check(prefill_budget is None or budget is not None, f"prefill_budget={prefill_budget} goes with a budget, not with ratio={ratio}")

    short = f"prefill_budget={prefill_budget} is smaller than budget={budget}: a prompt's end could not keep budget; give at least that"
    check(prefill_budget is None or budget is None or prefill_budget >= budget, short)
    refuses = UNREAD if prefill_budget is None else (*UNREAD, SCORED)

    def retention(spec: LayerSpec) -> Retention:
        most, at = amount(budget, ratio, spec)

        def rule(c: Candidates) -> Array:
            if recent is not None or at is None:
                return score(c, recent or 0, normalise)
            assert c.length is not None
            return score(c, (at(c.length) // 2)[:, None, None], normalise)

        kept = Retention(most, max(period, 1), 0, rule, received=group_mean, staged=prefill_budget)
        return kept._replace(budget_at=at, endless=period == 0)

    arguments = dict(budget=budget, recent=recent, period=period, normalise=normalise, prefill_budget=prefill_budget)
    arguments |= dict(ratio=ratio, page=page)
    return composed("h2o", arguments, raw(page), retention, refuses=refuses)
