"""Which tokens stay in memory: a rule that ranks candidate rows, and helpers that all such rules share.

Rank space: the rows a sequence holds and the new ones, in order of position, numbered 0..total-1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from sejax.types import Array, LayerSpec, Qkv, Rows


class Candidates(NamedTuple):
    """What a rule may look at when rows must go; nothing that it leaves alone is computed.

    total i32[R,H] candidate rows; mass f32[R,H,G,C] attention each received from the observation window (summed over its
    queries, softmax over all candidates), None if the rule observes nothing; window i32[R] queries observed; length i32[R]
    logical tokens of the sequence; queries [R,W,H,G,D] the last W queries, of which the last `window` count; read(name) ->
    [R,H,C,...] in rank space: "keys", "values" (as stored), "pos", "score"; sums: the rule's own, [R,...].
    """

    total: Array
    mass: Array | None
    window: Array
    length: Array | None = None
    queries: Array | None = None
    read: Callable[..., Array] | None = None
    sums: Any = None


class Sums(NamedTuple):
    """Statistics of a whole sequence that only grow: every call adds of(spec, Qkv, Rows) -> tree of [R,...].

    shapes(spec) -> the tree as jax.ShapeDtypeStructs [1,...].
    """

    shapes: Callable[[LayerSpec], Any]
    of: Callable[[LayerSpec, Qkv, Rows], Any]


class Shares(NamedTuple):
    """How the heads of a layer share its rows. mean: rows a head keeps in the mean, where the retention has a budget_at the most
    that says; of(scores f32[R,H,C], total i32[R,H], window, length i32[R]) -> i32[R,H] rows each keeps, at most the retention's budget."""

    mean: int
    of: Callable[[Array, Array, Array, Array], Array]


class Retention(NamedTuple):
    """budget: most rows a seal or trim keeps; slack: rows that may follow before the next one; window: queries observed.

    score(Candidates) -> f32[R,H,C] in rank space: the best rows stay (+inf: always; ties to the lowest rank).
    count(total i32[R,H]) -> i32[R,H] rows to keep where that depends on the candidates (at most budget); None: budget.
    restart: the window starts anew with each prompt; a trim soon after has fewer queries.
    received(mass f32[R,H,G,C]) -> f32[R,H,C]: what a call adds to each row's "score"; None: rows have no score.
    staged: rows of a prompt that stay between its chunks, at least budget; None: all, until the seal.
    budget_at(length i32[R]) -> i32[R]: rows that stay at that logical length, at most budget; None: budget. See `amount`. With shares:
        the mean over heads.
    endless: decode steps never trim: a run holds a whole sequence, and turns are sealed at their end.
    """

    budget: int
    slack: int
    window: int
    score: Callable[..., Array]
    count: Callable[[Array], Array] | None = None
    restart: bool = False
    received: Callable[[Array], Array] | None = None
    sums: Sums | None = None
    shares: Shares | None = None
    staged: int | None = None
    budget_at: Callable[[Array], Array] | None = None
    endless: bool = False

    def rows(self, length: Array) -> Array | int:
        """The budget at a logical length: i32[R] -> i32[R,1]."""
        return self.budget_at(length)[:, None] if self.budget_at else self.budget

    def quota(self, total: Array, length: Array) -> Array:
        """Rows that stay of `total` candidates: i32[R,H], i32[R] -> i32[R,H]."""
        return jnp.minimum(total, self.count(total) if self.count else self.rows(length))


def best(scores: Array, total: Array, count: Array, most: int, rows: int) -> Array:
    """The ranks to keep, ascending, padded with -1: f32[R,H,C], total, count i32[R,H] (count <= most) -> i32[R,H,rows]."""
    rank = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    # -inf is kept for padding: a real candidate with score -inf still beats it.
    scores = jnp.where(rank < total[..., None], jnp.maximum(scores, jnp.finfo(jnp.float32).min), -jnp.inf)
    value, at = lax.top_k(scores, min(most, scores.shape[-1]))
    real = (value > -jnp.inf) & (jnp.arange(at.shape[-1]) < count[..., None])
    at = jnp.sort(jnp.where(real, at, scores.shape[-1]).astype(jnp.int32), axis=-1)
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


LOCAL_SETS = (
    ("token selection", "kept sets differ by layer and head, one list of tokens cannot name them; use a selection by pages"),
    ("cluster selection", "what is kept is too little to be clustered; use a selection by pages"),
)
"""Refusals (cache.method.Parts) of rules that keep another set in every layer and head."""

UNREAD = (("selection", "tokens that are not read receive no attention to be ranked by; use a rule that observes queries"),)
"""Refusals of rules that rank by the attention of every step."""


def default_slack(budget: int | None) -> int:
    """Rows a run has beyond its budget: seals are rare, the extra memory is a quarter."""
    return max(1024, (budget or 0) // 4)


def fractions(ratio: float, spec: LayerSpec) -> np.ndarray:
    """max(1, int(length * ratio)) for every length up to the spec's max_len: i32[max_len + 1], in double precision."""
    if spec.max_len < 1:
        raise ValueError(f"ratio={ratio} needs the longest sequence's length: LayerSpec.max_len is not set")
    return np.maximum(1, (np.arange(spec.max_len + 1) * ratio).astype(np.int64)).astype(np.int32)


def amount(budget: int | None, ratio: float | None, spec: LayerSpec) -> tuple[int, Callable[[Array], Array] | None]:
    """A Retention's budget and budget_at: `budget` rows at any length, or the fraction `ratio` of it (4 bytes a token of max_len)."""
    if ratio is None:
        assert budget is not None
        return budget, None
    table = fractions(ratio, spec)
    return int(table[-1]), lambda length: jnp.asarray(table).at[length].get(mode="clip")
