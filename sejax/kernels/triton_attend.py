"""The attention of `gpu_attend` as Triton kernels that jax_triton starts: same contract, cutting and partials, without Pallas.

It serves where Pallas cannot: a jax whose Pallas has no Triton lowering, and pools of 2^31 elements or more (`dispatch` chooses).
Needs the packages triton and jax_triton, which the extra `cuda` installs; importing this module needs neither.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sejax.kernels import tuned
from sejax.kernels.gpu_attend import cutting
from sejax.kernels.gpu_view import arrays, facts
from sejax.kernels.launch import pow2
from sejax.kernels.tuned import Attend
from sejax.types import Array, AttentionView

TOGETHER = 32  # partials merged in one step


class Form(NamedTuple):
    """What the kernels know besides Facts: axes of the arrays that come in two forms, or not at all (0); sizes of tiles.

    rows: of a partial; wide, deep: sizes of keys and values, padded; values: the size itself, for Triton takes `f.value` for its own.
    """

    ids: int
    length: int
    first: int
    own: int
    bias: int
    pos: int
    rows: int
    wide: int
    deep: int
    values: int


def lacks() -> str:
    """What to install, as a clause; empty where nothing is missing."""
    names = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    return f"attention through Triton needs {' and '.join(names)}: pip install 'sejax[cuda]'" if names else ""


def start(
    kernel: str,
    grid: tuple[int, ...],
    outs: Sequence[jax.ShapeDtypeStruct],
    args: Sequence[Array],
    *,
    warps: int,
    stages: int,
    **constants: Any,
) -> list[Array]:
    """The one door to jax_triton: run `kernel` of triton_kernels on args, then outs, over a static grid."""
    if said := lacks():
        raise ImportError(said)
    import jax_triton

    from sejax.kernels import triton_kernels

    options = {"num_warps": warps, "num_stages": stages, "name": f"triton_{kernel}"}
    return jax_triton.triton_call(*args, kernel=getattr(triton_kernels, kernel), out_shape=list(outs), grid=grid, **options, **constants)


def attend(q: Array, view: AttentionView, tune: Attend | None = None) -> tuple[Array, Array]:
    """Softmax attention of q [R,T,H,G,D] over what `view` lists: same contract as `kernels.attention.attend`.

    Returns out [R,T,H,G,Dv] in q's dtype and lse f32[R,T,H,G]; a query that sees nothing has out 0 and lse -inf.
    Raises ImportError where triton or jax_triton is not installed.
    """
    q = view.q if view.q is not None else q
    rows, new, heads, group, size = q.shape
    tune = tune or tuned.attend(size, view.k.dtype.itemsize, new * group, rows * heads)
    f = facts(q, view, tune.tile, tune.block)
    cut = cutting(f, tune)
    named = arrays(q, view)
    wide = min(f.tile, new * group)
    axes = {name: named[name].ndim if name in named else 0 for name in ("ids", "length", "first", "own", "bias", "pos")}
    form = Form(**axes, rows=wide, wide=max(16, pow2(size)), deep=max(16, pow2(f.value)), values=f.value)
    constants = {"f": f, "form": form, "cut": cut}
    given = {name: named.get(name, view.length) for name in ("q", "k", "v", "ids", "length", "first", "own", "bias", "pos", "q_pos")}
    slots = f.items * cut.slots
    programs = min(slots, tune.programs)
    shapes = [jax.ShapeDtypeStruct((slots, wide, f.value), jnp.float32), jax.ShapeDtypeStruct((slots, wide), jnp.float32)]
    more = {"warps": tune.warps, "stages": tune.stages, "programs": programs}
    part, part_lse = start("split", (programs,), shapes, list(given.values()), **more, **constants)
    shapes = [
        jax.ShapeDtypeStruct((rows, new, heads, group, f.value), q.dtype),
        jax.ShapeDtypeStruct((rows, new, heads, group), jnp.float32),
    ]
    args = [given[name] for name in ("length", "first", "own")] + [part, part_lse]
    out, lse = start("merge", (f.items, wide), shapes, args, warps=4, stages=2, some=TOGETHER, **constants)
    return out, lse
