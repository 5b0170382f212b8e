"""Named shapes shared by the tests, the tuner and the benches, and random inputs that break careless kernels.

Inputs are hostile on purpose: memory no listed token lives in is NaN, table entries past a row's length are out of
range, lengths are ragged and include 0, 1 and full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from sejax.types import Array, AttentionView


class Listing(NamedTuple):
    """One attention call. `entries` listed ids of `run` tokens a row; `by_head`: ids [R,H,M], lengths [R,H]."""

    rows: int = 3
    new: int = 1
    heads: int = 2
    group: int = 4
    size: int = 64
    page: int = 16
    run: int = 16
    entries: int = 5
    by_head: bool = False
    own: bool = False
    first: bool = False
    window: int | None = None  # positions listed, seen through this window
    bias: bool = False
    softcap: float | None = None
    scale: float | None = None
    dtype: str = "float32"
    stored: str | None = None  # dtype of the pools, where it differs


SMALL = {
    "plain": Listing(),
    "one_query_head": Listing(group=1, size=96, page=1, run=1, entries=37),
    "group_8_wide": Listing(rows=2, group=8, size=256, page=64, run=64, entries=2, dtype="bfloat16"),
    "group_5_tokens_of_pages": Listing(group=5, size=128, run=1, entries=33, bias=True),
    "ragged_heads": Listing(by_head=True, size=96, first=True),
    "half_pages": Listing(run=8, entries=7, first=True, softcap=5.0, scale=0.3),
    "window": Listing(page=64, run=16, window=20, by_head=True),
    "fp8": Listing(dtype="bfloat16", stored="float8_e4m3fn", size=128),
    "one_row": Listing(rows=1, heads=1, entries=9),
    "chunk": Listing(new=7, own=True, group=3, entries=4),
    "chunk_window": Listing(new=5, window=9, size=32, group=8),
}
"""For interpreted tests: seconds each, every feature somewhere."""

CARD = {
    "plain": Listing(rows=4, heads=8, size=128, entries=200, dtype="bfloat16"),
    "page_1": Listing(rows=3, heads=8, size=128, page=1, run=1, entries=3001, dtype="bfloat16"),
    "page_64_group_8": Listing(rows=5, heads=4, group=8, size=64, page=64, run=64, entries=33, dtype="bfloat16"),
    "wide_group_1": Listing(rows=2, heads=8, group=1, size=256, entries=77, dtype="bfloat16"),
    "odd_96": Listing(rows=2, heads=5, group=7, size=96, entries=99, dtype="bfloat16", first=True),
    "ragged_heads": Listing(rows=3, heads=8, size=128, entries=150, by_head=True, dtype="bfloat16"),
    "bias_softcap": Listing(rows=3, heads=8, size=128, run=1, entries=1000, bias=True, softcap=30.0, dtype="bfloat16"),
    "window": Listing(rows=3, heads=8, size=128, entries=100, window=300, by_head=True, dtype="bfloat16"),
    "fp8": Listing(rows=3, heads=8, size=128, entries=100, dtype="bfloat16", stored="float8_e4m3fn"),
    "fp32": Listing(rows=3, heads=3, group=3, size=64, entries=100),
    "many_rows": Listing(rows=100, heads=8, size=128, entries=40, dtype="bfloat16"),
    "short_chunk": Listing(rows=2, new=33, heads=8, size=128, entries=40, own=True, dtype="bfloat16"),
    "short_chunk_window": Listing(rows=2, new=40, heads=4, size=128, entries=40, window=100, dtype="bfloat16"),
    "chunk": Listing(rows=2, new=512, heads=8, size=128, entries=100, own=True, dtype="bfloat16"),
    "chunk_ragged": Listing(rows=2, new=256, heads=8, size=128, entries=60, by_head=True, first=True, dtype="bfloat16"),
}
"""For the card: real sizes, the same features."""

DECODE = {
    "b32_t32k": Listing(rows=32, heads=8, size=128, entries=2048, dtype="bfloat16"),
    "b8_t32k": Listing(rows=8, heads=8, size=128, entries=2048, dtype="bfloat16"),
    "b1_t128k": Listing(rows=1, heads=8, size=128, entries=8192, dtype="bfloat16"),
    "b16_t2k_by_head": Listing(rows=16, heads=8, size=128, entries=128, by_head=True, dtype="bfloat16"),
    "b64_t4k": Listing(rows=64, heads=8, size=128, entries=280, dtype="bfloat16"),
}
"""Decode benches: every row full."""


def lengths(shape: Listing, rng: np.random.Generator) -> np.ndarray:
    """Ragged lengths with a full, an empty and a one-token row where there are rows enough; a chunk's own tokens fit."""
    total = shape.entries * shape.run
    size = (shape.rows, shape.heads) if shape.by_head else (shape.rows,)
    found = rng.integers(1, total + 1, size)
    for at, value in ((0, total), (-1, 0), (-2, 1)):
        if shape.rows > abs(at):
            found[at] = value
    return np.maximum(found, shape.new) if shape.own else found


def listing(shape: Listing, seed: int) -> tuple[Array, AttentionView, Array]:
    """Random q [R,T,H,G,D], a view with pages of its own for every entry, and count i32[R] of real queries."""
    rng = np.random.default_rng(seed)
    s, sub = shape, shape.page // shape.run
    length = lengths(s, rng)
    slots = s.rows * (s.heads if s.by_head else 1) * s.entries
    pages = -(-slots // (sub * (s.heads if s.by_head else 1))) + 3
    ids = rng.permutation(pages * sub * (s.heads if s.by_head else 1))[:slots]
    ids = ids.reshape(*length.shape, s.entries).astype(np.int32)
    dtype, stored = jnp.dtype(s.dtype), jnp.dtype(s.stored or s.dtype)
    live = np.arange(s.entries * s.run) < length[..., None]
    at = (ids[..., None] * s.run + np.arange(s.run)).reshape(live.shape)
    mine = np.zeros(pages * (s.heads if s.by_head else 1) * s.page, bool)
    mine[at[live]] = True
    mine = mine.reshape(pages, -1, s.page, 1)
    pools = [np.where(mine, rng.normal(size=(pages, s.heads, s.page, s.size)), np.nan) for _ in range(2)]
    real = rng.integers(1, s.new + 1, s.rows).astype(np.int32)
    more: dict[str, Any] = {"softcap": s.softcap, "scale": s.scale, "window": s.window}
    if s.own:
        more["own"] = jnp.asarray(real)
    if s.first:
        more["first"] = jnp.asarray(rng.integers(0, s.run + 2, length.shape), jnp.int32)
    if s.window is not None:
        more["pos"] = jnp.asarray(rng.integers(0, 2 * s.window, (pages, s.heads, s.page)), jnp.int32)
        more["q_pos"] = jnp.asarray(rng.integers(s.window, 2 * s.window, (s.rows, s.new)), jnp.int32)
    if s.bias:
        more["bias"] = jnp.asarray(rng.normal(size=(s.rows, s.heads, s.entries * s.run)), jnp.float32)
    used = np.arange(s.entries) * s.run < length[..., None]
    ids = np.where(used, ids, rng.choice(np.asarray([-7, 2**30, 2**31 - 1]), ids.shape)).astype(np.int32)
    k, v = (jnp.asarray(pool, stored) for pool in pools)
    q = jnp.asarray(rng.normal(size=(s.rows, s.new, s.heads, s.group, s.size)), dtype)
    view = AttentionView(k=k, v=v, ids=jnp.asarray(ids), length=jnp.asarray(length, jnp.int32), run=s.run, **more)
    return q, view, jnp.asarray(real)
