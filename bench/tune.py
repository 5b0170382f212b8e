"""Sweep a kernel's block sizes on the card and print the fastest: `python -m bench.tune [decode|scores|select|mass ...]`.

Programs are compiled in threads, then timed one after another. What wins goes by hand into `sejax/kernels/tuned.py`,
select's and the copy's into `gpu_pages.py` and `gpu_prefill.py`.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import decoding, full, looped, rotating, scores_given
from bench.timing import read_bandwidth, seconds
from sejax.kernels import gpu_attend, gpu_mass, gpu_pages, gpu_prefill, tuned
from sejax.kernels.shapes import DECODE, Listing

Program = Callable[..., Any]
LOOPS = 20
MASS = [(64, 16, 256, 4, 3), (64, 32, 256, 4, 3), (64, 16, 256, 4, 5), (128, 16, 256, 8, 3), (64, 16, 128, 4, 3), (64, 16, 256, 8, 3)]


def race(title: str, make: Callable[..., Program], configs: Iterable[tuple[Any, ...]], given: Any, calls: int, floor: float) -> None:
    """Compile `make(*config)` for every config, time each on `given`, print them fastest first."""

    def build(config: tuple[Any, ...]) -> Any:
        try:
            return config, jax.jit(make(*config)).lower(*given).compile()
        except Exception as error:  # a config may exceed shared memory: report and go on
            return config, str(error)[:90]

    with ThreadPoolExecutor(16) as pool:
        built = list(pool.map(build, configs))
    found = []
    for config, program in built:
        if isinstance(program, str):
            print("failed", config, program)
            continue
        found.append((seconds(program, *given, calls=calls, repeats=5), config))
    print(f"== {title}: floor {floor * 1e6:.1f} us", flush=True)
    for taken, config in sorted(found)[:12]:
        print(f"   {taken * 1e6:9.1f} us  {floor / taken:5.3f}  {config}", flush=True)


def decode(read: float) -> None:
    grid = [(64, longest, 2, stages) for longest in (16, 32, 64, 128) for stages in (3, 4, 5)]
    grid += [(128, longest, 4, stages) for longest in (16, 32) for stages in (2, 3)]
    for name, shape in DECODE.items():
        q, views = rotating(shape)

        def make(block: int, longest: int, warps: int, stages: int) -> Program:
            tune = tuned.Attend(block, longest=longest, warps=warps, stages=stages)
            return decoding(functools.partial(gpu_attend.attend, tune=tune), 5)

        race(f"decode {name}", make, grid, (q, views), 40, 2 * shape.rows * shape.heads * shape.entries * shape.run * shape.size * 2 / read)


def scores(read: float) -> None:
    for rows, width in ((128, 2048), (32, 8192)):
        given = scores_given(rows, width, 6)

        def make(block: int, steps: int, stages: int, warps: int) -> Program:
            return looped(functools.partial(gpu_pages.page_scores, tune=tuned.Scores(block, steps, warps, stages)), LOOPS)

        grid = [(64, 4), (64, 8), (64, 16), (128, 2), (128, 4), (128, 8)]
        grid = [(*x, stages, warps) for x in grid for stages in (3, 5) for warps in (2, 4)]
        grid += [(block, 1, 1, warps) for block in (32, 64, 128) for warps in (2, 4)]
        race(f"scores r{rows} p{width}", make, grid, (given,), 6 * (LOOPS + 1), 2 * rows * width * 256 / read)


def select(read: float) -> None:
    for rows, width, k in ((128, 2048, 128), (128, 8192, 128), (4, 131072, 128)):
        given = [(jax.random.normal(jax.random.key(i), (rows, width)),) for i in range(6)]

        def make(warps: int, wide: int, k: int = k) -> Program:
            return looped(lambda s: gpu_pages.select(s, k, warps=warps, piece=wide), LOOPS)

        grid = itertools.product((4, 8), (2048, 8192)) if width > 8192 else itertools.product((4, 8, 16), (8192,))
        race(f"select r{rows} p{width}", make, grid, (given,), 6 * (LOOPS + 1), rows * width * 4 / read)


def mass(read: float) -> None:
    shape = Listing(rows=1, new=64, heads=8, size=128, entries=8192, dtype="bfloat16")
    q, views = full(shape, tables=2)
    lse = jax.random.normal(jax.random.key(3), q.shape[:-1]) + 12
    real = jnp.ones(q.shape[:2], bool)

    def make(*tune: int) -> Program:
        run = looped(functools.partial(gpu_mass.mass, tune=tuned.Mass(*tune)), 5)
        return lambda q, views, lse: run([(q, view, lse, real) for view in views])

    floor = 8 * 131072 * (128 * 2 + 4 * 4) / read
    race("mass w64 128K", make, MASS, (q, views, lse), 12, floor)


def prefill(read: float) -> None:
    shape = Listing(rows=1, new=2048, heads=8, size=128, entries=4096 + 128, dtype="bfloat16")
    q, (view,) = full(shape)
    view = view.replace(own=jnp.asarray([2048], jnp.int32))
    floor = 4 * 32 * 128 * 2048 * (65536 + 1024) / 600e12
    race("prefill cudnn 2k x 64k", lambda: lambda q, view: gpu_prefill.attend(q, view), [()], (q, view), 1, floor)
    start, stop = jnp.zeros((1, 8), jnp.int32), jnp.full((1, 8), shape.entries * 16, jnp.int32)

    def copy(block: int) -> Program:
        return lambda view: gpu_prefill.contiguous(view, start, stop, shape.entries * 16, block=block)

    race("contiguous", copy, [(16,), (32,), (64,), (128,)], (view,), 1, 8 * shape.entries * 16 * 512 / read)

    def split(tile: int, block: int, warps: int, stages: int) -> Program:
        tune = tuned.Attend(block, tile, warps=warps, stages=stages)
        return lambda q, view: gpu_attend.attend(q, view, tune)

    grid = [(64, 64, 4, 5), (128, 64, 8, 5), (128, 64, 8, 7)]
    race("prefill split 2k x 64k", split, grid, (q, view), 1, floor)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["decode", "scores", "select", "mass", "prefill"]
    ceiling = read_bandwidth()
    print(f"read {ceiling / 1e12:.3f} TB/s", np.__version__, jax.devices())
    for name in wanted:
        {"decode": decode, "scores": scores, "select": select, "mass": mass, "prefill": prefill}[name](ceiling)
