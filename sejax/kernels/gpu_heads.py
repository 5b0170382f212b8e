"""Splitting, normalising and rotating the heads of a packed projection in one launch: one program a token and head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.kernels.launch import bound, launch, load, pow2, store
from sejax.types import Array


def _turn(*refs_: Any, names: tuple[str, ...], heads: int, group: int, size: int, eps: float) -> None:
    refs = dict(zip(names, refs_, strict=True))
    n, head, half, wide = pl.program_id(0), pl.program_id(1), size // 2, heads * group
    d = jnp.arange(pow2(half), dtype=jnp.int32)
    real = d < half
    dtype = refs["qkv"].dtype
    a, b = (load(refs["qkv"], n, head * size + i * half + d, mask=real, other=jnp.zeros((), dtype)) for i in (0, 1))
    query, key = head < wide, (head >= wide) & (head < wide + heads)
    value = head >= wide + heads
    at = head - wide
    store(refs["v"], n, jnp.maximum(at - heads, 0), d, value=a, mask=real & value)
    store(refs["v"], n, jnp.maximum(at - heads, 0), half + d, value=b, mask=real & value)
    if "q_norm" in refs:
        x, y = a.astype(jnp.float32), b.astype(jnp.float32)
        shrink = lax.rsqrt((jnp.sum(x * x) + jnp.sum(y * y)) / size + eps)

        def weight(i: int) -> Array:
            mine, other = (load(refs[name], i * half + d, mask=real, other=jnp.zeros((), dtype)) for name in ("q_norm", "k_norm"))
            return jnp.where(query, mine, other)

        # rounded where the reference rounds
        a, b = (x * shrink).astype(dtype) * weight(0), (y * shrink).astype(dtype) * weight(1)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    cos, sin = (load(refs[name], n, d, mask=real, other=0.0) for name in ("cos", "sin"))
    parts = ((a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype))
    h, g = lax.div(head, group), lax.rem(head, group)
    for i, part in enumerate(parts):
        store(refs["q"], n, jnp.minimum(h, heads - 1), g, i * half + d, value=part, mask=real & query)
        store(refs["k"], n, jnp.clip(at, 0, heads - 1), i * half + d, value=part, mask=real & key)


def turned(
    qkv: Array, cos: Array, sin: Array, norms: tuple[Array, Array] | None, eps: float, heads: int, group: int
) -> tuple[Array, Array, Array]:
    """See `kernels.heads.turned`."""
    rows, size = len(qkv), 2 * cos.shape[1]
    named = {"qkv": qkv, "cos": cos, "sin": sin} | (dict(zip(("q_norm", "k_norm"), norms, strict=True)) if norms else {})
    kernel = bound(_turn, names=(*named, "q", "k", "v"), heads=heads, group=group, size=size, eps=eps)
    shapes = [jax.ShapeDtypeStruct((rows, *s, size), qkv.dtype) for s in ((heads, group), (heads,), (heads,))]
    q, k, v = launch(kernel, (rows, heads * (group + 2)), shapes, list(named.values()), name="turn_heads", warps=1)
    return q, k, v
