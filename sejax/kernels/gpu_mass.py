"""Probability each listed token receives (column sums of attention), in one pass over the keys with the merged lse.

Decode gives it per token for one query; with T > 1 it is H2O's column sum or SnapKV's observation-window score. Each
program holds a kv head's queries while its share of the keys streams past; many queries (more than a tile) stream past
one block of keys instead. Products are taken keys first: the sum over queries then stays inside a thread until the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels.gpu_view import LOG2E, Facts, arrays, facts, load, logits2, place, queries, rows_of, span
from sejax.kernels.launch import launch, pow2, store
from sejax.types import Array, AttentionView


def _mass(*refs_: Any, names: tuple[str, ...], f: Facts, steps: int) -> None:
    refs = dict(zip(names, refs_, strict=True))
    pair, part = pl.program_id(0), pl.program_id(1)
    h, r = lax.rem(pair, f.heads), lax.div(pair, f.heads)
    first, end = span(refs, f, r, h)
    lane = jnp.arange(f.tile, dtype=jnp.int32)

    def asked(t: Array, g: Array, real: Array) -> tuple[Array, Array, Array]:
        """Query rows, their new tokens, and their lse times log2(e)."""
        q = queries(refs["q"], f, r, h, t, g, real)
        return q, t, load(refs["lse"], r, t, h, g, mask=real, other=jnp.inf) * LOG2E

    def weights(block: tuple[Array, Array, Any, Array], q: Array, t: Array, lse: Array) -> Array:
        j, live, spot, k = block
        return jnp.exp2(logits2(refs, f, q, k, spot, t, r, h, j, live, flip=True, raw=True) - lse[None, :])

    held = _held(f)
    if f.new == 1:
        tiles = [asked(jnp.zeros_like(lane), lane, lane < f.group)]
    elif held:
        tiles = [asked(lane, jnp.full_like(lane, g), lane < f.new) for g in range(f.group)]

    def step(i: Array, carry: Array) -> Array:
        j = (part * steps + i) * f.block + jnp.arange(f.block, dtype=jnp.int32)
        live = (j >= first) & (j < end)
        spot = place(refs["ids"], f, r, h, j, live)
        block = (j, live, spot, rows_of(refs["k"], spot, f.size, live))
        if f.new == 1:
            p = jnp.where(live[:, None], weights(block, *tiles[0]), 0.0)
            at_g, at_j = jnp.broadcast_to(lane[None, :], p.shape), jnp.broadcast_to(j[:, None], p.shape)
            store(refs["mass"], r, h, at_g, at_j, value=p, mask=(at_g < f.group) & (at_j < f.tokens))
            return carry
        for g in range(f.group):
            if held:
                total = weights(block, *tiles[g])
            else:
                total = _walk(f, jnp.min(j) < end, lambda t, g=g: weights(block, *asked(t, jnp.full_like(lane, g), t < f.new)))
            store(refs["mass"], r, h, g, j, value=jnp.where(live, jnp.sum(total, axis=1), 0.0), mask=j < f.tokens)
        return carry

    lax.fori_loop(0, steps, step, jnp.int32(0))


def _walk(f: Facts, some: Array, weights: Callable[[Array], Array]) -> Array:
    """Sum of `weights(t)` over all tiles of new tokens, none if not `some`."""
    lane = jnp.arange(f.tile, dtype=jnp.int32)
    tiles = jnp.where(some, jnp.int32(-(-f.new // f.tile)), 0)
    return lax.fori_loop(0, tiles, lambda i, total: total + weights(i * f.tile + lane), jnp.zeros((f.block, f.tile), jnp.float32))


def _held(f: Facts) -> bool:
    """Whether all queries of a kv head stay on chip while keys stream past."""
    return f.new <= f.tile and f.group * f.tile * pow2(f.size) <= 32768


class Tuning(NamedTuple):
    """block: keys of a step; steps: key blocks of a program."""

    block: int = 64
    steps: int = 16
    warps: int = 4
    stages: int = 5


def mass(q: Array, view: AttentionView, lse: Array, real: Array, tune: Tuning | None = None) -> Array:
    """Probability each listed token receives, relative to `lse`, summed over the queries that are `real`.

    q [R,T,H,G,D], lse f32[R,T,H,G], real bool[R,T] -> f32[R,H,G,C], C = M * run; same contract as `kernels.attention.mass`.
    """
    q = view.q if view.q is not None else q
    rows, new, heads, group, _ = q.shape
    lse = jnp.where(real[:, :, None, None] & (lse > -jnp.inf), lse, jnp.inf)
    tile = 16 if new == 1 else max(16, min(64, pow2(new)))
    listed = view.ids.shape[-1] * view.run
    held = _held(facts(q, view, tile, 0))
    tune = tune or (Tuning() if held else Tuning(block=128, steps=1, stages=1))
    f = facts(q, view, tile, min(tune.block, max(16, pow2(listed))))
    steps = min(tune.steps, -(-listed // f.block)) if held else 1
    named = {name: array for name, array in arrays(q, view).items() if name != "v"} | {"lse": lse}
    kernel = functools.partial(_mass, names=(*named, "mass"), f=f, steps=steps)
    shape = jax.ShapeDtypeStruct((rows, heads, group, listed), jnp.float32)
    grid = (rows * heads, -(-listed // (f.block * steps)))
    return launch(kernel, grid, [shape], list(named.values()), name="attend_mass", warps=tune.warps, stages=tune.stages)[0]
