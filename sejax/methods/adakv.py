"""Heads with spread attention keep more tokens, heads with peaked attention fewer."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from sejax.cache.method import check, composed, either
from sejax.cache.ragged import Ragged
from sejax.cache.retention import LOCAL_SETS, Candidates, Retention, Shares, amount, default_slack, pool
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method


def score(candidates: Candidates, kernel: int, pooling: str) -> Array:
    """Pooled attention, mean over the window and the group, +inf for the window: Candidates -> f32[R,H,C]."""
    assert candidates.mass is not None
    seen = candidates.mass.mean(axis=2) / jnp.maximum(candidates.window, 1)[:, None, None]
    before_window = jnp.arange(seen.shape[-1]) < (candidates.total - candidates.window[:, None])[..., None]
    return jnp.where(before_window, pool(seen, before_window, kernel, pooling), jnp.inf)


def largest(values: Array, most: Array | int, times: int = 1) -> tuple[Array, Array]:
    """The times * most largest of the last axis, -inf behind them, and where they lie; most: a number, or i32[R,1] for values [R,...]."""
    width = values.shape[-1]
    best, at = lax.top_k(values, min(times * most, width) if isinstance(most, int) else width)
    count = times * jnp.reshape(most, (-1, *[1] * (values.ndim - 1)))
    return jnp.where(jnp.arange(best.shape[-1]) < count, best, -jnp.inf), at


def winners(scores: Array, base: Array | int) -> Array:
    """How many of the H * base best scores over all heads lie in each: f32[R,H,C], -inf no candidate -> i32[R,H].

    Heads meet here: under tensor parallelism this is where the collective goes.
    """
    rows, heads, width = scores.shape
    value, at = largest(scores.reshape(rows, -1), base, heads)
    head = jnp.where(value > -jnp.inf, at // width, heads)
    return jnp.sum(head[:, None, :] == jnp.arange(heads)[:, None], axis=-1).astype(jnp.int32)


def normalised(scores: Array, base: Array | int) -> Array:
    """Each head's scores (-inf no candidate) times the share of its sum that its `base` best hold."""
    positive = jnp.maximum(scores, 0)
    best = jnp.maximum(largest(positive, base)[0], 0)
    return scores * (best.sum(-1) / jnp.maximum(positive.sum(-1), 1e-30))[..., None]


def shares(scores: Array, total: Array, window: Array, base: Array | int, safe: Array | int, floor: float, normalize: bool) -> Array:
    """Rows each head keeps, window included: scores +inf in the window; safe = int(base * floor)."""
    past = total - window[:, None]
    scores = jnp.where(jnp.arange(scores.shape[-1]) < past[..., None], scores, -jnp.inf)
    count = winners(normalised(scores, base) if normalize else scores, base)
    capacity = jnp.round(count * (1 - floor) + safe).astype(jnp.int32)  # half to even
    return jnp.minimum(capacity, past) + window[:, None]


def safeguarded(scores: Array, total: Array, budget: Array | int, safe: Array | int) -> Array:
    """kvpress's rule: the `budget` * H best over all heads, after each head's first `safe` = int(budget * floor) were made safe."""
    real = jnp.arange(scores.shape[-1]) < total[..., None]
    scores = jnp.where(real, scores, -jnp.inf)
    order = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1, stable=True)
    return winners(jnp.where((order < jnp.reshape(safe, (-1, 1, 1))) & real, jnp.inf, scores), budget)


def adakv(
    budget: int | None = None,
    window: int = 32,
    kernel: int = 7,
    pooling: Literal["avg", "max"] = "max",
    floor: float = 0.2,
    normalize: bool = False,
    rule: Literal["official", "kvpress"] = "official",
    slack: int | None = None,
    ratio: float | None = None,
    page: int = 16,
) -> Method:
    """Choose by window attention, but deal a layer's budget to its heads by their scores.

    base = budget - window; c_h = how many of the layer's H * base best scores lie in head h; head h keeps its
    round(c_h (1 - floor) + int(base floor)) best tokens and the window.

    Family: eviction
    Paper: Feng et al. 2024, arXiv 2407.11550.
    Differs: scores per kv head (the group's mean, before pooling). A count above what a head has is cut, not given to others.
        All heads of a layer decide again together, when one has filled the `slack` rows beyond its share.
    Keeps: `budget` tokens per kv head and layer in the mean over heads after a seal (up to half a token a head more by rounding);
        at most `slack` more in each head. Memory is by head pages: no head pays for another's length.

    Args:
        budget: mean over heads of the tokens kept per kv head and layer, window included (default 2048, where ratio is not given).
        window: observation window, queries at the end of the prompt.
        kernel: pooling width in tokens, odd; 1 does not pool.
        pooling: "max" or "avg" (padding zeros counted).
        floor: part of the mean that every head keeps in any case, 0 to 1.
        normalize: whether a head's scores are first weighted by the share that its `base` best hold of their sum.
        rule: "official", or "kvpress" (its first int(budget floor) tokens safe in each head, the rest by score over all heads).
        slack: tokens a head holds beyond its share (default max(1024, budget / 4)); 1 seals at every turn.
        ratio: instead of a budget: the fraction of the session's tokens kept in the mean, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 2048)
    slack = default_slack(budget) if slack is None else slack
    check(
        window >= 1 and (budget is None or budget > window), f"budget={budget} must be larger than window={window}, and window at least 1"
    )
    check(kernel >= 1 and kernel % 2 == 1, f"kernel={kernel} must be odd: an even width would shift the scores; use {kernel + 1}")
    check(pooling in ("avg", "max"), f'pooling={pooling!r} must be "avg" or "max"')
    check(0 <= floor <= 1, f"floor={floor} must lie between 0 and 1")
    check(rule in ("official", "kvpress"), f'rule={rule!r} must be "official" or "kvpress"')
    check(slack >= 1, f"slack={slack} must be at least 1")
    arguments = dict(budget=budget, window=window, kernel=kernel, pooling=pooling, floor=floor)
    arguments |= dict(normalize=normalize, rule=rule, slack=slack, ratio=ratio, page=page)

    def retention(spec: LayerSpec) -> Retention:
        mean, at = amount(budget, ratio, spec)
        table = (np.arange(mean + 1) * floor).astype(np.int32)  # int(n * floor), in double precision
        safe = lambda n: int(table[n]) if isinstance(n, int) else jnp.asarray(table)[n]  # noqa: E731
        base = max(mean - window, 0)
        most = spec.heads * mean if rule == "kvpress" else window + round(spec.heads * base * (1 - floor) + int(table[base]))

        def deal(scores: Array, total: Array, seen: Array, length: Array) -> Array:
            if at is None:
                n, past = mean, base
            else:
                n = at(length)[:, None]
                past = jnp.maximum(n - window, 0)
            if rule == "kvpress":
                quota = safeguarded(scores, total, n, safe(n))
            else:
                quota = shares(scores, total, seen, past, safe(past), floor, normalize)
            return jnp.where(n <= seen[:, None], n, quota)  # a fraction may not even hold the window

        return Retention(most, slack, window, lambda c: score(c, kernel, pooling), shares=Shares(mean, deal), budget_at=at)

    return composed("adakv", arguments, raw(page), retention, refuses=LOCAL_SETS, kind=Ragged)
