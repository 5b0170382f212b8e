"""What the device knows of each slot while it decodes: so that a stopped row idles in the very next step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sejax.serve.request import Sampling
from sejax.serve.sampling import Choice, choices, sample
from sejax.types import Array

STOPS = 16  # stop ids a row may have
FORCED = 512  # ids the test hook may force


class Live(NamedTuple):
    """Per slot, slot axis first. A row takes part in a step while left > 0 and it is not due for a trim."""

    length: Any  # i32 tokens whose state is stored
    last: Any  # i32 sampled token that comes next
    left: Any  # i32 tokens it may still sample
    due: Any  # bool a trim must come first
    stop: Any  # i32[STOPS], -1 padded
    choice: Choice
    forced: Any  # i32[FORCED], -1 padded: the first ids to "sample"


def record(sampling: Sampling, stop_ids: tuple[int, ...], length: int, last: int, left: int, step: int, seed: int) -> Live:
    """One slot's values as numpy arrays (no slot axis)."""
    stop = np.full(STOPS, -1, np.int32)
    stop[: len(stop_ids)] = stop_ids
    forced = np.full(FORCED, -1, np.int32)
    forced[: len(sampling.force_tokens)] = sampling.force_tokens
    choice = jax.tree.map(lambda leaf: leaf[0], choices([sampling], [seed], [step]))
    return Live(np.int32(length), np.int32(last), np.int32(left), np.bool_(False), stop, choice, forced)


def empty(slots: int) -> Live:
    """All slots idle."""
    one = record(Sampling(), (), 0, 0, 0, 0, 0)
    return jax.tree.map(lambda leaf: jnp.zeros((slots, *np.shape(leaf)), np.asarray(leaf).dtype), one)


def of_slots(live: Live, slot: Array) -> Live:
    """Rows of slots i32[R]; an idle row (slot S) reads zeros, so it never takes part."""
    return jax.tree.map(lambda leaf: leaf.at[slot].get(mode="fill", fill_value=0), live)


def choose(logits: Array, rows: Live, count: Array, greedy: bool = False) -> tuple[Array, Live]:
    """Sample one token for each row of `rows` and step their counters: f32[R,V], count i32[R] -> (i32[R], rows).

    greedy: every row is known to take the arg-max (ties: lowest id).
    """
    step = rows.choice.step
    forced = jnp.take_along_axis(rows.forced, jnp.minimum(step, FORCED - 1)[:, None], axis=1)[:, 0]
    chosen = jnp.argmax(logits, -1).astype(jnp.int32) if greedy else sample(logits, rows.choice)
    token = jnp.where((step < FORCED) & (forced >= 0), forced, chosen)
    stopped = jnp.any(token[:, None] == rows.stop, axis=1)
    left = jnp.where(stopped, 0, rows.left - 1)
    real = count > 0
    return token, rows._replace(
        last=jnp.where(real, token, rows.last),
        left=jnp.where(real, left, rows.left),
        choice=rows.choice._replace(step=step + count),
    )


def store(live: Live, slot: Array, rows: Live) -> Live:
    """live with the rows of slots i32[R] replaced; idle rows are dropped."""
    return jax.tree.map(lambda leaf, new: leaf.at[slot].set(new, mode="drop"), live, rows)
