"""Time every kernel inside a compiled chain against its floor: `python -m bench.kernels [case prefix ...]`.

Floors: bytes that must be read once over the read bandwidth measured in this process, or FLOPs over the matmul peak.
Inputs rotate so that the L2 never holds the next call's data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.timing import matmul_peak, read_bandwidth, record, seconds
from sejax.kernels import gpu_attend, gpu_mass, gpu_pages, gpu_prefill, triton_attend
from sejax.kernels.shapes import DECODE, Listing
from sejax.types import AttentionView

Attend = Callable[[jax.Array, AttentionView], tuple[jax.Array, jax.Array]]


def full(shape: Listing, seed: int = 0, tables: int = 1) -> tuple[jax.Array, list[AttentionView]]:
    """Random q and, for each table, a view of a full listing in random pages of one shared pool."""
    s = shape
    total = s.rows * s.entries // (s.page // s.run)
    keys = jax.random.split(jax.random.key(seed), 3)
    k, v = (jax.random.normal(key, (total * tables, s.heads, s.page, s.size), jnp.dtype(s.dtype)) for key in keys[:2])
    q = jax.random.normal(keys[2], (s.rows, s.new, s.heads, s.group, s.size), jnp.dtype(s.dtype))
    ids = np.random.default_rng(seed).permutation(total * tables).reshape(tables, s.rows, s.entries).astype(np.int32)
    if s.by_head:
        ids = ids[:, :, None, :] * s.heads + np.arange(s.heads, dtype=np.int32)[:, None]
    length = jnp.full((s.rows, s.heads) if s.by_head else (s.rows,), s.entries * s.run, jnp.int32)
    return q, [AttentionView(k=k, v=v, ids=jnp.asarray(one), length=length, run=s.run) for one in ids]


def decoding(attend: Attend, loops: int = 10) -> Callable[[jax.Array, list[AttentionView]], jax.Array]:
    """One program of loops x 8 calls; each call's output is the next one's query."""

    def program(q: jax.Array, views: list[AttentionView]) -> jax.Array:
        def body(_: Any, q: jax.Array) -> jax.Array:
            for i in range(8):
                q = attend(q, views[i % len(views)])[0]
            return q

        return lax.fori_loop(0, loops, body, q)

    return program


def rotating(shape: Listing) -> tuple[jax.Array, list[AttentionView]]:
    """Inputs of a decode call, with as many tables as defeat the L2."""
    moved = 2 * shape.rows * shape.heads * shape.entries * shape.run * shape.size * 2
    return full(shape, tables=max(1, int(4e8 // moved)))


def looped(program: Callable[..., Any], loops: int) -> Callable[[list[tuple[Any, ...]]], Any]:
    """One program that calls `program` on every argument tuple, `loops` + 1 times over: the host launches once for all."""

    def chain(given: list[tuple[Any, ...]]) -> Any:
        rest = [one[1:] for one in given]

        def every(first: list[Any]) -> list[Any]:
            return [program(x, *more) for x, more in zip(first, rest, strict=True)]

        def body(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            first, _ = lax.optimization_barrier(state)  # else the loop's body does not change and leaves the loop
            return first, every(first)

        first = [one[0] for one in given]
        return lax.fori_loop(0, loops, body, (first, every(first)))[1]

    return chain


def each_seconds(program: Callable[..., Any], given: list[tuple[Any, ...]], loops: int = 20) -> float:
    """Seconds a call of `program` over rotating arguments."""
    return seconds(jax.jit(looped(program, loops)), given, calls=len(given) * (loops + 1), repeats=5, queued=2)


def decode(read: float) -> None:
    for name, shape in DECODE.items():
        floor = 2 * shape.rows * shape.heads * shape.entries * shape.run * shape.size * 2 / read
        given = rotating(shape)
        for case, attend in {"kernel": gpu_attend.attend, "triton": triton_attend.attend}.items():
            if case == "triton" and (lacks := triton_attend.lacks()):
                print(f"  decode_triton/{name} left out: {lacks}")
                continue
            taken = seconds(jax.jit(decoding(attend)), *given, calls=80, queued=2)
            record("kernels", f"decode_{case}/{name}", taken * 1e6, "us", floor * 1e6, floor / taken)


def scores_given(rows: int, width: int, tables: int) -> list[tuple[Any, ...]]:
    """Arguments of page_scores at Qwen3-8B's shape (rows = sequences x 8 kv heads)."""
    batch, heads, group, size = rows // 8, 8, 4, 128
    pages = batch * width
    pools = 3
    keys = jax.random.split(jax.random.key(1), 2)
    low, high = (jax.random.normal(key, (pages * pools, heads, size), jnp.bfloat16) for key in keys)
    ids = np.random.default_rng(0).permutation(pages * pools).reshape(pools, batch, width).astype(np.int32)
    count = jnp.full((batch, heads), width, jnp.int32)
    tables_ = [jnp.asarray(one) for one in ids]
    q = jax.random.normal(jax.random.key(2), (tables, batch, heads, group, size), jnp.bfloat16)
    return [(q[i], low, high, tables_[i % pools], count) for i in range(tables)]


def quest(read: float) -> None:
    for rows, width in ((128, 2048), (32, 8192)):
        taken = each_seconds(gpu_pages.page_scores, scores_given(rows, width, 24))
        floor = 2 * rows * width * 128 * 2 / read
        record("kernels", f"quest_scores/r{rows}_p{width}", taken * 1e6, "us", floor * 1e6, floor / taken)
    for rows, width, k in ((128, 2048, 128), (128, 8192, 128), (4, 131072, 128)):
        given = [(jax.random.normal(jax.random.key(i), (rows, width)),) for i in range(24)]
        taken = each_seconds(lambda s, k=k: gpu_pages.select(s, k), given)
        floor = rows * width * 4 / read
        record("kernels", f"quest_select/r{rows}_p{width}_k{k}", taken * 1e6, "us", floor * 1e6, taken * 1e6)


def prefill(peak: float) -> None:
    chunk, prefix, group = 8192, 65536, 4
    shape = Listing(rows=1, new=chunk, heads=8, group=group, size=128, entries=(chunk + prefix) // 16, dtype="bfloat16")
    q, (view,) = full(shape)
    view = view.replace(own=jnp.asarray([chunk], jnp.int32))
    flops = 4 * 8 * group * 128 * (chunk * prefix + chunk * chunk / 2)

    def program(q: jax.Array, view: AttentionView) -> jax.Array:
        for _ in range(2):
            q = gpu_prefill.attend(q, view)[0]
        return q

    taken = seconds(jax.jit(program), q, view, calls=2, repeats=5, queued=2)
    record("kernels", "prefill_attention/q8k_t64k", flops / taken / 1e12, "TFLOP/s", peak / 1e12, flops / taken / peak)


def window(read: float) -> None:
    shape = Listing(rows=1, new=64, heads=8, size=128, entries=8192, dtype="bfloat16")
    q, views = full(shape, tables=2)
    lse = jax.random.normal(jax.random.key(3), q.shape[:-1]) + 12
    real = jnp.ones(q.shape[:2], bool)
    given = [(q * (1 + i), views[i % 2], lse, real) for i in range(4)]
    taken = each_seconds(gpu_mass.mass, given)
    floor = 8 * 131072 * (128 * 2 + 4 * 4) / read
    record("kernels", "window_scores/t128k", taken * 1e6, "us", floor * 1e6, taken / floor)


def main(only: list[str]) -> None:
    """Run the cases whose group starts with one of `only` (default: all)."""
    read, peak = read_bandwidth(), matmul_peak()
    record("kernels", "ceiling/read", read / 1e12, "TB/s", None, None)
    record("kernels", "ceiling/matmul", peak / 1e12, "TFLOP/s", None, None)
    groups = {"decode": (decode, read), "quest": (quest, read), "prefill": (prefill, peak), "window": (window, read)}
    for name, (run, ceiling) in groups.items():
        if not only or any(name.startswith(x) for x in only):
            run(ceiling)


if __name__ == "__main__":
    main(sys.argv[1:])
