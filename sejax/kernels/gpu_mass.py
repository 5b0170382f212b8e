"""Probability each listed token receives (column sums of attention), in one pass over the keys with the merged lse.

Decode gives it per token for one query; with T > 1 it is H2O's column sum or SnapKV's observation-window score. Each
program holds one tile of keys and walks the queries, so every key is read once. Products are taken keys first: the sum
over queries then needs no exchange between threads until the end.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels.gpu_view import LOG2E, Facts, arrays, facts, load, logits2, place, queries, rows_of, span
from sejax.kernels.launch import launch, pow2, store
from sejax.types import Array, AttentionView


def _mass(*refs_: Any, names: tuple[str, ...], f: Facts) -> None:
    refs = dict(zip(names, refs_, strict=True))
    pair, c = pl.program_id(0), pl.program_id(1)
    h, r = lax.rem(pair, f.heads), lax.div(pair, f.heads)
    j = c * f.block + jnp.arange(f.block, dtype=jnp.int32)
    first, end = span(refs, f, r, h)
    live = (j >= first) & (j < end)
    lane = jnp.arange(f.tile, dtype=jnp.int32)
    spot = place(refs["ids"], f, r, h, j, live)
    k = rows_of(refs["k"], spot, f.size, live)

    def weights(t: Array, g: Array, real: Array) -> Array:
        q = queries(refs["q"], f, r, h, t, g, real)
        lse = load(refs["lse"], r, t, h, g, mask=real, other=jnp.inf)
        s = logits2(refs, f, q, k, spot, t, r, h, j, live, flip=True)
        return jnp.exp2(s - (lse * LOG2E)[None, :])

    shape = (f.block, f.tile)
    if f.new == 1:
        p = weights(jnp.zeros_like(lane), lane, lane < f.group)
        at_g, at_j = jnp.broadcast_to(lane[None, :], shape), jnp.broadcast_to(j[:, None], shape)
        store(refs["mass"], r, h, at_g, at_j, value=p, mask=(at_g < f.group) & (at_j < f.tokens))
        return
    tiles = jnp.where(c * f.block < end, jnp.int32(-(-f.new // f.tile)), 0)
    for g in range(f.group):

        def step(i: Array, total: Array, g: int = g) -> Array:
            t = i * f.tile + lane
            return total + weights(t, jnp.full_like(lane, g), t < f.new)

        total = lax.fori_loop(0, tiles, step, jnp.zeros(shape, jnp.float32))
        store(refs["mass"], r, h, g, j, value=jnp.sum(total, axis=1), mask=j < f.tokens)


def mass(q: Array, view: AttentionView, lse: Array, real: Array, block: int = 128, warps: int = 4, stages: int = 1) -> Array:
    """Probability each listed token receives, relative to `lse`, summed over the queries that are `real`.

    q [R,T,H,G,D], lse f32[R,T,H,G], real bool[R,T] -> f32[R,H,G,C], C = M * run; same contract as `kernels.attention.mass`.
    """
    q = view.q if view.q is not None else q
    rows, new, heads, group, _ = q.shape
    lse = jnp.where(real[:, :, None, None] & (lse > -jnp.inf), lse, jnp.inf)
    tile = 16 if new == 1 else max(16, min(64, pow2(new)))
    listed = view.ids.shape[-1] * view.run
    f = facts(q, view, tile, min(block, max(16, pow2(listed))))
    named = {name: array for name, array in arrays(q, view).items() if name != "v"} | {"lse": lse}
    kernel = functools.partial(_mass, names=(*named, "mass"), f=f)
    shape = jax.ShapeDtypeStruct((rows, heads, group, listed), jnp.float32)
    grid = (rows * heads, -(-listed // f.block))
    return launch(kernel, grid, [shape], list(named.values()), name="attend_mass", warps=warps, stages=stages)[0]
