"""Choosing the next token on the device: pure, row by row, without sorting the vocabulary and without reading a value on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sejax.kernels.launch import on_gpu
from sejax.serve.request import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this mean arg-max: dividing by them would overflow."""

SLACK = 1e-6
"""top_p is reached when the mass is within this of it: p = [.5, .3, .2] in float32 must give one token at top_p = .5."""


class Choice(NamedTuple):
    """How each row chooses. temperature, top_p, min_p f32[R]; top_k i32[R] (0, -1: off); seed u32[R,2]; step i32[R].

    The random bits of a row come from its seed and step (the number of tokens it has sampled so far) and from nothing else.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    step: Any


def choices(samplings: Sequence[Sampling | None], seeds: Sequence[int], steps: Sequence[int]) -> Choice:
    """Host arrays (numpy) for R rows. None is an idle row: arg-max. `seeds` are used where a Sampling names none (any int64)."""
    rows = [s or Sampling() for s in samplings]
    words = [(s.seed if s.seed is not None else seed) % 2**64 for s, seed in zip(rows, seeds, strict=True)]
    return Choice(
        temperature=np.array([s.temperature for s in rows], np.float32),
        top_k=np.array([s.top_k for s in rows], np.int32),
        top_p=np.array([s.top_p for s in rows], np.float32),
        min_p=np.array([s.min_p for s in rows], np.float32),
        seed=np.array([(w >> 32, w & 0xFFFFFFFF) for w in words], np.uint32).reshape(-1, 2),
        step=np.array(steps, np.int32),
    )


def sample(logits: jax.Array, choice: Choice) -> jax.Array:
    """Next token of each row: f32[R,V] -> i32[R].

    Order: temperature, top_k, top_p (of what top_k left, renormalised), min_p (relative to the most probable). Ties go to the
    lowest id, in arg-max and at the border of top_k and top_p; the most probable token always stays. Each step that no row
    of the batch needs is skipped; a row's token does not depend on which rows stand beside it.
    """
    logits = logits.astype(jnp.float32)
    greedy = choice.temperature < GREEDY_BELOW
    cut = ~greedy & ((choice.top_k > 0) | (choice.top_p < 1))
    need = jnp.where(jnp.any(cut), 2, jnp.where(jnp.any(~greedy), 1, 0))
    best = jnp.argmax(logits, -1).astype(jnp.int32)

    def draw(keep: Any) -> jax.Array:
        z = _scaled(logits, choice)
        keep = keep(z) & (z >= jnp.log(choice.min_p)[:, None])
        return jnp.where(greedy, best, _drawn(jnp.where(keep, jnp.exp(z), 0), choice))

    if on_gpu():  # a branch would make the host wait for its predicate: all-greedy batches have a program of their own
        return draw(lambda z: _kept(z, choice))
    branches = (lambda: best, lambda: draw(jnp.isfinite), lambda: draw(lambda z: _kept(z, choice)))
    return jax.lax.switch(need, branches)


def _scaled(logits: jax.Array, choice: Choice) -> jax.Array:
    """Logits over temperature, the largest at 0: exp of it is the probability relative to the most probable token."""
    z = logits - jnp.max(logits, -1, keepdims=True)
    return z / jnp.maximum(choice.temperature, GREEDY_BELOW)[:, None]


def _drawn(weight: jax.Array, choice: Choice) -> jax.Array:
    """i32[R]: one token a row, with probability proportional to its weight; never one of weight 0."""

    def uniform(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)
        return 1 - jax.random.uniform(key, (), jnp.float32)  # in (0, 1]

    part = jax.vmap(uniform)(jnp.asarray(choice.seed), jnp.asarray(choice.step)) * jnp.sum(weight, -1)
    ids = _descending(weight)
    return -_border(ids, weight, part, ids[:, -1], ids[:, 0])


def _kept(z: jax.Array, choice: Choice) -> jax.Array:
    """bool[R,V]: what top_k, then top_p leave."""
    count = z.shape[-1]
    top_k = jnp.asarray(choice.top_k)
    k = jnp.where((top_k <= 0) | (top_k > count), count, top_k)
    keep = _smallest_prefix(z, jnp.ones_like(z), k.astype(jnp.float32))
    p = jnp.where(keep, jnp.exp(z), 0)
    total = jnp.sum(p, -1)
    top_p = jnp.asarray(choice.top_p)
    inside = _smallest_prefix(z, p, jnp.maximum((top_p - SLACK) * total, 0))
    return keep & (inside | (top_p >= 1)[:, None])


def _smallest_prefix(z: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """bool[R,V]: the shortest run of tokens, most probable first and lowest id first among equals, whose weight reaches `need` f32[R].

    Never empty. Bisection over the bits of z (<= 0) instead of a sort: 31 sums over the vocabulary; then once over ids where
    equal values straddle the border.
    """
    bits = jax.lax.bitcast_convert_type(z, jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers in the order of the floats
    order = jnp.where(z == 0, 0, order)
    lowest = jnp.min(order, -1)
    border = _border(order, weight, need, lowest, jnp.zeros_like(lowest))
    above, equal = order > border[:, None], order == border[:, None]
    rest = need - jnp.sum(jnp.where(above, weight, 0), -1)
    ids = _descending(z)
    first = jnp.max(jnp.where(equal, ids, -(2**30)), -1)
    last = jnp.min(jnp.where(equal, ids, 0), -1)
    edge = _border(ids, jnp.where(equal, weight, 0), rest, last, first)
    return above | (equal & (ids >= edge[:, None]))


def _descending(like: jax.Array) -> jax.Array:
    """i32[R,V]: 0, -1, -2, ...: an order in which the lowest id is the greatest."""
    return -jax.lax.broadcasted_iota(jnp.int32, like.shape, 1)


def _border(order: jax.Array, weight: jax.Array, need: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """i32[R]: the largest value t in [low, high] with sum(weight where order >= t) >= need; `low` where there is none."""

    def narrow(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = high - (high - low) // 2
        enough = jnp.sum(jnp.where(order >= middle[:, None], weight, 0), -1) >= need
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return jax.lax.while_loop(lambda b: jnp.any(b[0] < b[1]), narrow, (low, high))[0]
