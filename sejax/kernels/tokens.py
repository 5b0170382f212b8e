"""Logits of single tokens, outside attention: what selections rank tokens by."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from sejax.kernels.attention import BLOCK, gather
from sejax.types import Array


def token_logits(q: Array, k: Array, table: Array, count: Array) -> Array:
    """q.k / sqrt(D) of one query a row against its first `count` rows, block by block up to the longest row.

    q [R,H,G,D]; k [N,H,P,D]; table i32[R,M]; count i32[R] -> f32[R,H,G,M*P], -inf from count on.
    """
    page, listed = k.shape[2], table.shape[1]
    size = min(listed, max(1, BLOCK // page))
    ids = jnp.pad(table, [(0, 0), (0, -listed % size)])
    width = size * page

    def step(i: Array, found: Array) -> Array:
        keys = gather(k, lax.dynamic_slice_in_dim(ids, i * size, size, axis=1), page).astype(q.dtype)
        part = jnp.einsum("rhgd,rhcd->rhgc", q, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        return lax.dynamic_update_slice_in_dim(found, part, i * width, axis=3)

    found = jnp.zeros((*q.shape[:3], ids.shape[1] * page), jnp.float32)
    found = lax.fori_loop(0, -(-jnp.max(count) // width), step, found)[..., : listed * page]
    return jnp.where(jnp.arange(found.shape[-1]) < count[:, None, None, None], found, -jnp.inf)
