"""SnapKV's choice with budgets that shrink from the first layer to the last."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from sejax.cache.method import check, composed, either
from sejax.cache.retention import LOCAL_SETS, Retention, default_slack, fractions
from sejax.cache.storage import raw
from sejax.methods.snapkv import score
from sejax.types import LayerSpec, Method


def kept(total: Any, budget: Any, window: int, layers: int, layer: int, beta: int) -> Any:
    """Tokens the official rule keeps of `total` in a layer; integers or integer arrays of numpy or jax."""
    xp = np if isinstance(total, (int, np.ndarray)) else jnp
    if layers == 1:
        return xp.minimum(total, budget)
    past = budget - window
    most = xp.minimum(2 * past - past // beta, total - window)  # of the first layer, window not counted
    step = (most - (2 * past - most)) // (layers - 1)
    count = window + most - layer * step
    count = xp.where(total < 2 * past, budget, count)
    return xp.where(total < budget, total, count)


def pyramidkv(
    budget: int | None = None,
    window: int = 8,
    kernel: int = 7,
    pooling: Literal["avg", "max"] = "max",
    beta: int = 20,
    schedule: Literal["fixed", "official"] = "fixed",
    budgets: tuple[int, ...] | None = None,
    slack: int | None = None,
    heads: Literal["each", "shared"] = "each",
    ratio: float | None = None,
    page: int = 16,
) -> Method:
    """Keep more tokens in lower layers, fewer in higher ones; which ones, the end of the prompt decides.

    P = budget - window, most = 2 P - P // beta, step = (most - P // beta) // (L - 1); layer l keeps window + most - l * step
    tokens, chosen as by window attention (mean over the group of the sum over the window, pooled).

    Family: eviction
    Paper: Cai et al. 2024, arXiv 2406.02069.
    Differs: the counts do not depend on the prompt's length ("official": they do, as in the paper's code, while the prompt is
        shorter than the first layer's budget). One set per kv head. Integer steps make the mean over layers a little larger
        than `budget` (133.5 for budget 128 in 32 layers). `slack` rows beyond the budget before the next decision.
    Keeps: `budget` tokens per kv head and layer in the mean over layers after a seal; at most `slack` more.

    Args:
        budget: mean over layers of the tokens kept per kv head, window included (default 2048, where ratio is not given).
        window: observation window, queries at the end of the prompt.
        kernel: pooling width in tokens, odd; 1 does not pool.
        pooling: "max" or "avg" (padding zeros counted).
        beta: the last layer keeps about (budget - window) / beta tokens beside the window.
        schedule: "fixed" counts, or the "official" ones, which depend on the prompt's length.
        budgets: tokens to keep in each layer, instead of a schedule.
        slack: tokens a run holds beyond its budget (default max(1024, budget / 4)); 1 seals at every turn.
        heads: "each" kv head its own set; "shared": one set, the largest score over all heads.
        ratio: instead of a budget: the fraction of the session's tokens kept in the mean, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 2048)
    check(budgets is None or ratio is None, f"budgets={budgets} and ratio={ratio} are both given; give one of them")
    slack = default_slack(budget) if slack is None else slack
    check(
        window >= 1 and (budget is None or budget > window), f"budget={budget} must be larger than window={window}, and window at least 1"
    )
    check(kernel >= 1 and kernel % 2 == 1, f"kernel={kernel} must be odd: an even width would shift the scores; use {kernel + 1}")
    check(pooling in ("avg", "max"), f'pooling={pooling!r} must be "avg" or "max"')
    check(beta >= 1, f"beta={beta} must be at least 1; the usual value is 20")
    check(schedule in ("fixed", "official"), f'schedule={schedule!r} must be "fixed" or "official"')
    check(heads in ("each", "shared"), f'heads={heads!r} must be "each" or "shared"')
    check(slack >= 1, f"slack={slack} must be at least 1")
    check(budgets is None or min(budgets, default=0) >= window, f"budgets={budgets} must each be at least window={window}")
    arguments = dict(budget=budget, window=window, kernel=kernel, pooling=pooling, beta=beta, schedule=schedule)
    arguments |= dict(budgets=budgets, slack=slack, heads=heads, ratio=ratio, page=page)

    def retention(spec: LayerSpec) -> Retention:
        check(budgets is None or len(budgets) == spec.layers, f"budgets={budgets} must name {spec.layers} layers, one number each")
        rule = lambda c: score(c, 0, kernel, pooling, heads)  # noqa: E731
        if budgets is not None:
            return Retention(budgets[spec.index], slack, window, rule)
        if budget is None:
            mean = fractions(ratio or 1, spec)
            total = 2 * mean if schedule == "fixed" else np.arange(len(mean))
            table = np.where(mean > window, kept(total, mean, window, spec.layers, spec.index, beta), mean).astype(np.int32)
            at = lambda length: jnp.asarray(table).at[length].get(mode="clip")  # noqa: E731
            return Retention(int(table.max()), slack, window, rule, budget_at=at)
        place = (budget, window, spec.layers, spec.index, beta)
        longest = 2 * budget  # the first layer's budget is smaller: beyond it the counts stay
        if schedule == "fixed":
            return Retention(int(kept(longest, *place)), slack, window, rule)
        most = int(np.max(kept(np.arange(longest + 1), *place)))
        return Retention(most, slack, window, rule, count=lambda total: kept(total, *place))

    return composed("pyramidkv", arguments, raw(page), retention, refuses=LOCAL_SETS)
