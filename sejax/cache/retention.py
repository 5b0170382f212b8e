"""Which tokens stay in memory: a rule that ranks candidate rows, and helpers that all such rules share.

Rank space: the rows a sequence holds and the new ones, in order of position, numbered 0..total-1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from sejax.types import Array


class Candidates(NamedTuple):
    """What a rule may look at when rows must go.

    total i32[R,H] candidate rows; mass f32[R,H,G,C] attention each received from the observation window (summed over its
    queries, softmax over all candidates), None if the rule observes nothing; window i32[R] queries observed.
    """

    total: Array
    mass: Array | None
    window: Array


class Retention(NamedTuple):
    """budget: rows kept by a seal or trim; slack: rows that may follow before the next one; window: queries observed.

    score(Candidates) -> f32[R,H,C] in rank space: the `budget` best rows stay (+inf: always; ties to the lowest rank).
    """

    budget: int
    slack: int
    window: int
    score: Callable[[Candidates], Array]


def best(scores: Array, total: Array, budget: int, rows: int) -> Array:
    """The ranks to keep, ascending, padded with -1: f32[R,H,C], total i32[R,H] -> i32[R,H,rows]."""
    rank = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    # -inf is kept for padding: a real candidate with score -inf still beats it.
    scores = jnp.where(rank < total[..., None], jnp.maximum(scores, jnp.finfo(jnp.float32).min), -jnp.inf)
    value, at = lax.top_k(scores, min(budget, scores.shape[-1]))
    at = jnp.sort(jnp.where(value == -jnp.inf, scores.shape[-1], at).astype(jnp.int32), axis=-1)
    at = jnp.where(at == scores.shape[-1], -1, at)[..., :rows]
    return jnp.pad(at, [(0, 0), (0, 0), (0, rows - at.shape[-1])], constant_values=-1)


def pool(scores: Array, valid: Array, kernel: int, kind: str) -> Array:
    """Stride-1 pooling along the last axis, kernel odd; "avg" counts padded zeros, "max" ignores padding.

    scores f32[R,H,C], valid bool[R,H,C]: what is not valid acts as padding.
    """
    if kernel == 1:
        return scores
    half = kernel // 2
    dims, pads = (1, 1, kernel), [(0, 0), (0, 0), (half, half)]
    if kind == "avg":
        return lax.reduce_window(jnp.where(valid, scores, 0.0), 0.0, lax.add, dims, (1, 1, 1), pads) / kernel
    return lax.reduce_window(jnp.where(valid, scores, -jnp.inf), -jnp.inf, lax.max, dims, (1, 1, 1), pads)


def over_heads(scores: Array, how: str) -> Array:
    """Make scores f32[R,H,C] equal over kv heads ("max" or "mean"): the one place where heads meet.

    Under tensor parallelism this is where the collective goes.
    """
    joined = jnp.max(scores, axis=1, keepdims=True) if how == "max" else jnp.mean(scores, axis=1, keepdims=True)
    return jnp.broadcast_to(joined, scores.shape)


def default_slack(budget: int) -> int:
    """Rows a run has beyond its budget: seals are rare, the extra memory is a quarter."""
    return max(1024, budget // 4)
