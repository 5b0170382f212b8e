"""The dense products of a transformer layer, with what stands right before and behind them: norm, bias, gate, residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sejax.kernels import dispatch
from sejax.types import Array


@dispatch.rms_norm
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis; the statistics in fp32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight


@dispatch.product
def product(
    x: Array,
    w: Array,
    bias: Array | None = None,
    norm: Array | None = None,
    eps: float = 0.0,
    gate: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: Any = None,
) -> Array:
    """residual + gated(rms_norm(x, norm) w^T + bias); each part only where it is given.

    x [n,in]; w [out,in]; bias [out]; norm [in]; gated(y) = gate(first half of y) * second half; residual [n,out] or [n,out/2].
    Returns that shape in `dtype` (x's if None).
    """
    if norm is not None:
        x = rms_norm(x, norm, eps)
    y = _product(x, w, dtype or x.dtype)
    if bias is not None:
        y = y + bias
    if gate is not None:
        first, second = jnp.split(y, 2, axis=1)
        y = gate(first) * second
    return y if residual is None else residual + y


def _product(x: Array, w: Array, dtype: Any) -> Array:
    """[n, in], [out, in] -> [n, out], in the form that the CPU runs fastest for this n (SmolLM2's weights, 2 cores, ms a step):

    fp32, plain / halves: n 1 21/18, 2 57/27, 8 70/37, 16 76/46, 32 101/88, 64 170/198. bf16, plain / doubled: n 1 680/33.
    """
    # float32 means float32: a GPU's default would round the operands to TF32
    options = {"preferred_element_type": dtype, "precision": lax.Precision.HIGHEST if x.dtype == jnp.float32 else None}
    (rows, size), out = x.shape, len(w)
    cpu = jax.default_backend() == "cpu"
    if cpu and x.dtype == jnp.float32 and rows <= 32 and out % 2 == 0:
        # as a batch of two, weights first, they are streamed; the plain form copies them into packed blocks first
        halves = (w.reshape(2, out // 2, size), jnp.broadcast_to(x, (2, rows, size)))
        return lax.dot_general(*halves, (((2,), (2,)), ((0,), (0,))), **options).reshape(out, rows).T
    if cpu and x.dtype == jnp.bfloat16 and rows == 1:
        return _product(jnp.concatenate([x, x]), w, dtype)[:1]
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), **options)
