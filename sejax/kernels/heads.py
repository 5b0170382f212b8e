"""From a layer's packed projection to its heads: split, normalised, rotated."""

from __future__ import annotations

import jax.numpy as jnp

from sejax.kernels import dispatch
from sejax.kernels.linear import rms_norm
from sejax.types import Array


def split(qkv: Array, heads: int, group: int, size: int) -> tuple[Array, Array, Array]:
    """qkv [n,(H*G+2*H)*D], queries before keys before values -> q [n,H,G,D], k, v [n,H,D]."""
    each = qkv.reshape(len(qkv), -1, size)
    wide = heads * group
    return each[:, :wide].reshape(-1, heads, group, size), each[:, wide : wide + heads], each[:, wide + heads :]


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split rotation in fp32: x [*lead,...,D], cos, sin f32[*lead,D/2] -> x's dtype. Su et al. 2021 (arXiv 2104.09864)."""
    cos, sin = (jnp.expand_dims(c, range(c.ndim - 1, x.ndim - 1)) for c in (cos, sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


@dispatch.turned
def turned(
    qkv: Array, cos: Array, sin: Array, norms: tuple[Array, Array] | None, eps: float, heads: int, group: int
) -> tuple[Array, Array, Array]:
    """The heads of a packed projection, queries and keys normalised (norms: their weights [D], or None) and rotated.

    qkv [n,(H*G+2*H)*D]; cos, sin f32[n,D/2] -> q [n,H,G,D], k, v [n,H,D].
    """
    q, k, v = split(qkv, heads, group, 2 * cos.shape[1])
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return rotated(q, cos, sin), rotated(k, cos, sin), v
