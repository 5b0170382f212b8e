"""Moving token rows by one list: the only code that moves what a sequence keeps."""

from __future__ import annotations

import jax.numpy as jnp

from sejax.kernels import rows as kernel
from sejax.types import Array


def compact(
    leaf: Array, table: Array, before: Array, keep: Array, target: Array, stage: Array | None = None, stage_table: Array | None = None
) -> Array:
    """Copy the rows `keep` names to rows 0.. of `target`, as stored bytes.

    leaf [N,H,P,...]; table i32[R,M] the old run, with before i32[R,H] rows; keep i32[R,H,B] ranks over (old rows, staged
    rows), -1 keeps the target row as it is; target i32[R,M'] the run to fill (it may be the old one).
    """
    moved = kernel.take(leaf, table, keep)
    if stage is not None and stage_table is not None:
        fresh = kernel.take(stage, stage_table, keep - before[..., None])
        old = (keep < before[..., None]).reshape(*keep.shape, *([1] * (moved.ndim - 3)))
        moved = jnp.where(old, moved, fresh.astype(moved.dtype))
    row = jnp.arange(keep.shape[-1], dtype=jnp.int32)
    row = jnp.where(keep >= 0, row, -1)
    return kernel.put(leaf, target, jnp.swapaxes(row, 1, 2), jnp.swapaxes(moved, 1, 2))
