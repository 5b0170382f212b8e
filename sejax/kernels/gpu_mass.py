"""Probability each listed token receives (column sums of attention), in one pass over the keys with the merged lse.

Decode gives it per token for one query; with T > 1 it is H2O's column sum or SnapKV's observation-window score. Each
program holds a kv head's queries while its share of the keys streams past; many queries (more than a tile) stream past
one block of keys instead. Products are taken keys first: the sum over queries then stays inside a thread until the end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels import tuned
from sejax.kernels.gpu_view import LOG2E, Facts, arrays, facts, load, logits2, place, queries, rows_of, span
from sejax.kernels.launch import bound, launch, pow2, store
from sejax.kernels.tuned import Mass
from sejax.types import Array, AttentionView


def _mass(*refs_: Any, names: tuple[str, ...], f: Facts, steps: int, groups: int) -> None:
    refs = dict(zip(names, refs_, strict=True))
    pair, part = pl.program_id(0), pl.program_id(1)
    h, r = lax.rem(pair, f.heads), lax.div(pair, f.heads)
    first, end = span(refs, f, r, h)
    lane = jnp.arange(groups * f.tile, dtype=jnp.int32)
    sets = range(-(-f.group // groups))

    def asked(c: int, tile: Array) -> tuple[Array, Array, Array]:
        """Query rows of a set of groups and a tile of new tokens, the new token of each, their lse times log2(e)."""
        t, g = tile * f.tile + lax.rem(lane, f.tile), c * groups + lax.div(lane, f.tile)
        real = (t < f.new) & (g < f.group)
        lse = load(refs["lse"], r, t, h, g, mask=real, other=jnp.inf)
        return queries(refs["q"], f, r, h, t, g, real), t, lse * LOG2E

    held = [asked(c, jnp.int32(0)) for c in sets] if f.new <= f.tile else []

    def step(i: Array, carry: Array) -> Array:
        j = (part * steps + i) * f.block + jnp.arange(f.block, dtype=jnp.int32)
        live = (j >= first) & (j < end)
        spot = place(refs["ids"], f, r, h, j, live)
        k = rows_of(refs["k"], spot, f.size, live)

        def weights(q: Array, t: Array, lse: Array) -> Array:
            return jnp.exp2(logits2(refs, f, q, k, spot, t, r, h, j, live, flip=True, raw=True) - lse[None, :])

        for c in sets:
            if held:
                total = weights(*held[c])
            else:
                tiles = jnp.where(jnp.min(j) < end, jnp.int32(-(-f.new // f.tile)), 0)
                none = jnp.zeros((f.block, groups * f.tile), jnp.float32)
                total = lax.fori_loop(0, tiles, lambda n, total, c=c: total + weights(*asked(c, n)), none)
            total = jnp.sum(total.reshape(f.block, groups, f.tile), axis=2)
            shape = (f.block, groups)
            at_j, at_g = jnp.broadcast_to(j[:, None], shape), c * groups + lax.broadcasted_iota(jnp.int32, shape, 1)
            total = jnp.where(live[:, None], total, 0.0)
            store(refs["mass"], r, h, at_g, at_j, value=total, mask=(at_g < f.group) & (at_j < f.tokens))
        return carry

    lax.fori_loop(0, steps, step, jnp.int32(0))


def mass(q: Array, view: AttentionView, lse: Array, real: Array, tune: Mass | None = None) -> Array:
    """Probability each listed token receives, relative to `lse`, summed over the queries that are `real`.

    q [R,T,H,G,D], lse f32[R,T,H,G], real bool[R,T] -> f32[R,H,G,C], C = M * run; same contract as `kernels.attention.mass`.
    """
    q = view.q if view.q is not None else q
    rows, new, heads, group, size = q.shape
    lse = jnp.where(real[:, :, None, None] & (lse > -jnp.inf), lse, jnp.inf)
    listed = view.ids.shape[-1] * view.run
    tile = min(64, pow2(new))
    tune = tune or tuned.mass(size, q.dtype.itemsize, new)
    groups = max(1, 16 // tile, min(pow2(group), tune.lanes // tile))
    f = facts(q, view, tile, min(tune.block, max(16, pow2(listed))))
    steps = min(tune.steps, -(-listed // f.block))
    named = {name: array for name, array in arrays(q, view).items() if name != "v"} | {"lse": lse}
    kernel = bound(_mass, names=(*named, "mass"), f=f, steps=steps, groups=groups)
    shape = jax.ShapeDtypeStruct((rows, heads, group, listed), jnp.float32)
    grid = (rows * heads, -(-listed // (f.block * steps)))
    return launch(kernel, grid, [shape], list(named.values()), name="attend_mass", warps=tune.warps, stages=tune.stages)[0]
