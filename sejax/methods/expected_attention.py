"""Keep what queries still to come are expected to attend to."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from sejax.cache.method import check, composed, either
from sejax.cache.retention import LOCAL_SETS, Candidates, Retention, Sums, amount, default_slack
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method, Qkv, Rows


def statistics(sinks: int) -> Sums:
    """Number, sum and sum of outer products of the queries before RoPE at positions >= sinks, per query head."""

    def shapes(spec: LayerSpec) -> dict[str, jax.ShapeDtypeStruct]:
        one = (1, spec.heads, spec.group, spec.head_dim)
        tail = {"count": (1,), "first": one, "second": (*one, spec.head_dim)}
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in tail.items()}

    def of(spec: LayerSpec, qkv: Qkv, rows: Rows) -> dict[str, Array]:
        new = jnp.arange(qkv.q_raw.shape[1], dtype=jnp.int32)
        real = (new < rows.count[:, None]) & (rows.start[:, None] + new >= sinks)
        q = jnp.where(real[:, :, None, None, None], qkv.q_raw.astype(jnp.float32), 0)
        second = jnp.einsum("rthgd,rthge->rhgde", q, q)
        return {"count": jnp.sum(real, axis=1).astype(jnp.float32), "first": jnp.sum(q, axis=1), "second": second}

    return Sums(shapes, of)


def moments(sums: dict[str, Array]) -> tuple[Array, Array]:
    """Mean [R,H,G,D] and biased covariance [R,H,G,D,D]."""
    count = jnp.maximum(sums["count"], 1.0)[:, None, None, None]
    mean = sums["first"] / count
    return mean, sums["second"] / count[..., None] - mean[..., :, None] * mean[..., None, :]


def ahead(spec: LayerSpec, length: Array, steps: int) -> tuple[Array, Array]:
    """Mean cosine and sine [R,D/2] of the rotations of positions length .. length + steps - 1."""
    half = spec.head_dim // 2
    unit = jnp.concatenate([jnp.ones(half), jnp.zeros(half)])  # (1, 0) turns into (cos, sin)
    pos = length[:, None] + jnp.arange(steps, dtype=jnp.int32)
    turned = jnp.mean(spec.rope(jnp.broadcast_to(unit, (*pos.shape, 2 * half)), pos), axis=1)
    return turned[:, :half], turned[:, half:]


def turn(x: Array, cos: Array, sin: Array) -> Array:
    """The averaged rotation, on the last axis of x [R,...,D]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = (t.reshape(t.shape[0], *([1] * (x.ndim - 2)), -1) for t in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attended(keys: Array, mean: Array, covariance: Array | None, real: Array) -> Array:
    """log of E[softmax] over the keys that are real, mean over the group: keys [R,H,C,D], mean [R,H,G,D] -> f32[R,H,C].

    In logs, because over thousands of keys most weights are too small for float32, and would tie.
    """
    keys = keys.astype(jnp.float32)
    dim = keys.shape[-1]
    logits = jnp.einsum("rhcd,rhgd->ghrc", keys, mean) / dim**0.5  # group and heads first, see the map below
    if covariance is not None:
        # One query head at a time: all at once would hold the keys once for each.
        spread = lax.map(lambda c: jnp.einsum("rhcd,rhde,rhce->hrc", keys, c, keys), jnp.moveaxis(covariance, 2, 0))
        logits += spread / (2 * dim)
    logits = jnp.where(jnp.swapaxes(real, 0, 1), logits, -jnp.inf)
    some = jnp.swapaxes(jnp.any(real, axis=-1, keepdims=True), 0, 1)
    weight = jax.nn.log_softmax(jnp.where(some, logits, 0.0), axis=-1)
    expected = jax.nn.logsumexp(weight, axis=0) - math.log(len(weight))
    return jnp.where(real, jnp.swapaxes(expected, 0, 1), -jnp.inf)


def score(candidates: Candidates, spec: LayerSpec, sinks: int, steps: int, covariance: bool, vnorm: bool, epsilon: float) -> Array:
    """Candidates -> f32[R,H,C], logs of the scores, +inf for sinks."""
    assert candidates.read is not None and candidates.length is not None
    keys = candidates.read("keys")
    rank = jnp.arange(keys.shape[2], dtype=jnp.int32)
    real = (rank >= sinks) & (rank < candidates.total[..., None])
    cos, sin = ahead(spec, candidates.length, steps)
    mean, spread = moments(candidates.sums)
    spread = jnp.swapaxes(turn(jnp.swapaxes(turn(spread, cos, sin), -1, -2), cos, sin), -1, -2)
    expected = attended(keys, turn(mean, cos, sin), spread if covariance else None, real)
    if epsilon:
        expected = jnp.logaddexp(expected, math.log(epsilon))
    if vnorm:
        expected += jnp.log(jnp.linalg.norm(candidates.read("values").astype(jnp.float32), axis=-1))
    return jnp.where(rank >= sinks, expected, jnp.inf)


def expected_attention(
    budget: int | None = None,
    sinks: int = 4,
    future: int = 512,
    covariance: bool = True,
    vnorm: bool = True,
    epsilon: float = 0.0,
    slack: int | None = None,
    ratio: float | None = None,
    page: int = 16,
) -> Method:
    """Keep the tokens that a Gaussian model of coming queries attends to, weighted by the size of their values.

    l_j = k_j . R mu / sqrt(D) + k_j' R Sigma R' k_j / (2 D); score_j = (mean over the group of softmax(l)_j + epsilon) |v_j|;
    mu, Sigma of the queries before RoPE, R the mean rotation of the next `future` positions.

    Family: eviction
    Paper: Devoto et al. 2025, arXiv 2510.00636.
    Differs: mu and Sigma run over all queries of the session so far (the paper: of its one prompt), sinks excluded. A run has
        `slack` rows beyond the budget before the next decision.
    Keeps: budget tokens per kv head and layer after a seal, at most budget + slack.

    Args:
        budget: tokens kept per kv head and layer, sinks included (default 4096, where ratio is not given).
        sinks: first tokens that are always kept.
        future: positions, from the end of the sequence, over which the rotation is averaged.
        covariance: whether the spread of queries counts, or only their mean.
        vnorm: whether scores are multiplied by the length of the value.
        epsilon: added to the expected attention before that product.
        slack: tokens a run holds beyond its budget (default max(1024, budget / 4)); 1 seals at every turn.
        ratio: instead of a budget: the fraction of the session's tokens that is kept, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 4096)
    slack = default_slack(budget) if slack is None else slack
    check(sinks >= 0 and (budget is None or budget > sinks), f"budget={budget} must be larger than sinks={sinks}, and sinks >= 0")
    check(future >= 1, f"future={future} must be at least 1 position")
    check(slack >= 1, f"slack={slack} must be at least 1")
    check(epsilon >= 0, f"epsilon={epsilon} must be >= 0")
    arguments = dict(budget=budget, sinks=sinks, future=future, covariance=covariance, vnorm=vnorm, epsilon=epsilon)
    arguments |= dict(slack=slack, ratio=ratio, page=page)

    def retention(spec: LayerSpec) -> Retention:
        rule = lambda c: score(c, spec, sinks, future, covariance, vnorm, epsilon)  # noqa: E731
        most, at = amount(budget, ratio, spec)
        return Retention(most, slack, 0, rule, sums=statistics(sinks), budget_at=at)

    return composed("expected_attention", arguments, raw(page), retention, refuses=LOCAL_SETS)
