"""Products of few rows with a weight matrix: what a decode step spends most of its time on, bound by reading the weights.

One program owns a tile of outputs and streams its weights once; the gate between two products, bias and residual ride along. One
row is multiplied and added, and where every program reads much more than the row, its norm rides along too. More rows go through
the matrix unit, whose pipeline a norm would break: theirs is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels import tuned
from sejax.kernels.launch import bound, dot, launch, load, pow2, store
from sejax.kernels.tuned import Product
from sejax.types import Array

MOST = 64  # rows: beyond, products are bound by arithmetic and the library's are better
SMALL = 2**25  # weights: above, the library's products are better from 17 rows on


def _grid(a: Array, b: Array) -> tuple[Array, Array]:
    shape = (a.shape[0], b.shape[0])
    return jnp.broadcast_to(a[:, None], shape), jnp.broadcast_to(b[None, :], shape)


def _tile(ref: Any, row: Array, at: Array, mask: Array) -> Array:
    i, j = _grid(row, at)
    return load(ref, i, j, mask=mask, other=jnp.zeros((), ref.dtype))


def _rows(*refs_: Any, names: tuple[str, ...], tune: Product, eps: float, gate: Callable[[Array], Array] | None) -> None:
    refs = dict(zip(names, refs_, strict=True))
    x, out = refs["x"], refs["out"]
    (rows, depth), outs = x.shape, out.shape[1]
    tall = 1 if tune.sums else max(16, pow2(rows))
    m, n = jnp.arange(tall, dtype=jnp.int32), pl.program_id(0) * tune.outs + jnp.arange(tune.outs, dtype=jnp.int32)
    some = jnp.broadcast_to((m < rows)[:, None], (tall, tune.outs)) & (n < outs)[None, :]
    parts = (n,) if gate is None else (n, n + outs)  # gate and up lie one behind the other
    ragged = depth % tune.depth != 0 or outs % tune.outs != 0

    def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        square, *accs = carry
        d = i * tune.depth + jnp.arange(tune.depth, dtype=jnp.int32)
        given = _tile(x, m, d, (m < rows)[:, None] & (d < depth)[None, :])
        if "norm" in refs:
            wide = given.astype(jnp.float32)
            square += wide * wide
            wide *= load(refs["norm"], d, mask=d < depth, other=jnp.zeros((), refs["norm"].dtype)).astype(jnp.float32)[None, :]
            given = wide.astype(given.dtype)
        found = []
        for part, acc in zip(parts, accs, strict=True):
            w = _tile(refs["w"], part, d, (n < outs)[:, None] & (d < depth)[None, :] if ragged else jnp.ones((tune.outs, tune.depth), bool))
            if tune.sums:
                found.append(acc + w.astype(jnp.float32) * given.astype(jnp.float32))
            else:
                found.append(acc + dot(given, w, trans_b=True))
        return square, *found

    size = (tune.outs, tune.depth) if tune.sums else (tall, tune.outs)
    zeros = [jnp.zeros(size, jnp.float32) for _ in parts]
    square, *accs = lax.fori_loop(0, -(-depth // tune.depth), step, (jnp.zeros((tall, tune.depth), jnp.float32), *zeros))
    if tune.sums:
        accs = [jnp.sum(acc, axis=1)[None, :] for acc in accs]
    if "norm" in refs:
        shrink = lax.rsqrt(jnp.sum(square, axis=1) / depth + eps)[:, None]
        accs = [acc * shrink for acc in accs]
    if "bias" in refs:
        accs = [
            a + load(refs["bias"], p, mask=n < outs, other=jnp.zeros((), refs["bias"].dtype)).astype(jnp.float32)[None, :]
            for a, p in zip(accs, parts, strict=True)
        ]
    value = accs[0] if gate is None else gate(accs[0]) * accs[1]
    if "residual" in refs:
        value += _tile(refs["residual"], m, n, some).astype(jnp.float32)
    i, j = _grid(m, n)
    store(out, i, j, value=value.astype(out.dtype), mask=some)


def product(
    x: Array,
    w: Array,
    bias: Array | None = None,
    norm: Array | None = None,
    eps: float = 0.0,
    gate: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: Any = None,
    tune: Product | None = None,
) -> Array:
    """See `kernels.linear.product`."""
    rows = len(x)
    outs = len(w) // (2 if gate else 1)
    tune = tune or tuned.product(rows, outs, gate is not None)
    tune = tune._replace(depth=min(tune.depth, max(16, pow2(x.shape[1]))))
    if norm is not None and (gate or not tune.sums):
        x, norm = rms_norm(x, norm, eps), None
    named = {"x": x, "w": w, "bias": bias, "norm": norm, "residual": residual}
    named = {name: array for name, array in named.items() if array is not None}
    kernel = bound(_rows, names=(*named, "out"), tune=tune, eps=eps, gate=gate)
    shape = jax.ShapeDtypeStruct((rows, outs), dtype or x.dtype)
    grid = (-(-outs // tune.outs),)
    return launch(kernel, grid, [shape], list(named.values()), name="few_rows", warps=tune.warps, stages=tune.stages)[0]


def multiplies(x: Array, w: Array, *_: Any, gate: Callable[[Array], Array] | None = None, dtype: Any = None, **__: Any) -> bool:
    """Whether `product` covers it, and wins: few rows of 16-bit floats, offsets in 32 bits, a gate that Pallas can lower."""
    few = 0 < len(x) <= (16 if w.size > SMALL else MOST)
    if gate is not None and "erf" in str(jax.make_jaxpr(gate)(1.0)):
        return False
    return few and x.dtype == w.dtype and x.dtype.name in ("bfloat16", "float16") and w.size < 2**31 and dtype in (None, x.dtype)


def _normed(x: Any, weight: Any, out: Any, *, size: int, eps: float) -> None:
    r, d = pl.program_id(0), jnp.arange(pow2(size), dtype=jnp.int32)
    given = load(x, r, d, mask=d < size, other=jnp.zeros((), x.dtype)).astype(jnp.float32)
    given *= lax.rsqrt(jnp.sum(given * given) / size + eps)
    scale = load(weight, d, mask=d < size, other=jnp.zeros((), weight.dtype))
    store(out, r, d, value=given.astype(x.dtype) * scale, mask=d < size)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [n,in], weight [in]; see `kernels.linear.rms_norm`."""
    kernel = bound(_normed, size=x.shape[1], eps=eps)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(kernel, (len(x),), [shape], [x, weight], name="rms_norm", warps=8 if x.shape[1] > 1024 else 4)[0]


def normalises(x: Array, weight: Array, eps: float) -> bool:
    """Whether `rms_norm` covers it: rows that one program holds."""
    same = x.dtype == weight.dtype and x.dtype.name in ("bfloat16", "float16")
    return same and x.ndim == 2 and 0 < x.size < 2**31 and x.shape[1] <= 16384
