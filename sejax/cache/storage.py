"""How a kept token is represented. `raw` stores keys (after RoPE) and values as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from sejax.kernels import rows as kernel
from sejax.types import Array, AttentionView, LayerSpec

Leaves = dict[str, Array]


class Storage(NamedTuple):
    """Encode, decode and layout of token rows; it owns its leaves and nothing else.

    init(spec, pages) -> leaves [N,H,P,...]
    append(leaves, table, row i32[R,T,H], k, v [R,T,H,D]) -> leaves; negative rows are dropped
    view(leaves, **fields) -> an AttentionView over the leaves
    keys, values (leaves, table, row i32[R,H,B]) -> [R,H,B,D] as stored
    """

    page: int
    grain: int  # tokens that are encoded together
    order: Literal["chunk", "layer"]
    init: Callable[[LayerSpec, int], Leaves]
    append: Callable[[Leaves, Array, Array, Array, Array], Leaves]
    view: Callable[..., AttentionView]
    keys: Callable[[Leaves, Array, Array], Array]
    values: Callable[[Leaves, Array, Array], Array]


def raw(page: int = 16) -> Storage:
    """Keys and values in the model's dtype, `page` tokens a page."""

    def init(spec: LayerSpec, pages: int) -> Leaves:
        shape = (pages, spec.heads, page, spec.head_dim)
        return {"k": jnp.zeros(shape, spec.dtype), "v": jnp.zeros(shape, spec.dtype)}

    def append(leaves: Leaves, table: Array, row: Array, k: Array, v: Array) -> Leaves:
        k, v = kernel.puts((leaves["k"], leaves["v"]), table, row, (k, v))
        return {"k": k, "v": v}

    def view(leaves: Leaves, **fields: Any) -> AttentionView:
        return AttentionView(k=leaves["k"], v=leaves["v"], run=fields.pop("run", page), **fields)

    def keys(leaves: Leaves, table: Array, row: Array) -> Array:
        return kernel.take(leaves["k"], table, row)

    def values(leaves: Leaves, table: Array, row: Array) -> Array:
        return kernel.take(leaves["v"], table, row)

    return Storage(page, 1, "chunk", init, append, view, keys, values)
