"""Block sizes of the card's kernels: by device, then by shape; measured once (`python -m bench.tune`, whose winners go in here by hand).

A row holds up to its bounds, and the first row that holds counts. A card that nobody measured takes the sizes of one that was, where
the compute capability is the same, else SMALL: what fits the 99 KB of shared memory that a program has on every card since Ampere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sejax.kernels.launch import device, pow2

ANY = math.inf

type Rows[Sizes] = tuple[tuple[tuple[float, ...], Sizes], ...]


class Attend(NamedTuple):
    """block: listed tokens a step; tile: query rows; longest: blocks of a piece at most; programs: at most, beyond they loop;
    fill: programs that fill the card, into which few items are cut (128 items, nearly one a multiprocessor, stay whole)."""

    block: int = 64
    tile: int = 16
    longest: int = 64
    programs: int = 4096
    warps: int = 2
    stages: int = 5
    fill: int = 255


class Mass(NamedTuple):
    """block: keys of a step; steps: key blocks of a program; lanes: query rows (groups x new tokens) of one product."""

    block: int = 64
    steps: int = 16
    lanes: int = 256
    warps: int = 8
    stages: int = 3


class Product(NamedTuple):
    """outs: outputs of a tile; depth: inputs a step; sums: multiply and add instead of the matrix unit (one row)."""

    outs: int = 16
    depth: int = 256
    warps: int = 4
    stages: int = 4
    sums: bool = False


class Scores(NamedTuple):
    """block: pages of a step; steps: blocks of a program."""

    block: int = 64
    steps: int = 2
    warps: int = 2
    stages: int = 3


class Blocks(NamedTuple):
    """A card's rows, each (bounds, sizes); what the bounds bound, the functions below say."""

    attend: Rows[Attend]
    mass: Rows[Mass]
    product: Rows[Product]
    scores: Rows[Scores]


SMALL = Blocks(
    attend=(
        ((256, 16, ANY), Attend(64, stages=3)),
        ((256, ANY, ANY), Attend(64, tile=64, warps=4, stages=3)),
        ((512, 16, ANY), Attend(32, stages=3)),
        ((512, ANY, ANY), Attend(32, tile=32, warps=4, stages=2)),
        ((ANY, 16, ANY), Attend(16, stages=2)),
        ((ANY, ANY, ANY), Attend(16, tile=16, stages=2)),
    ),
    mass=(
        ((128, 2, 64), Mass(steps=8, lanes=64, warps=4, stages=2)),
        ((ANY, ANY, ANY), Mass(block=32, steps=1, lanes=64, warps=4, stages=1)),
    ),
    product=(
        ((1, ANY, 0), Product(4, 1024, stages=2, sums=True)),
        ((1, ANY, 1), Product(1, 4096, stages=2, sums=True)),
        ((16, ANY, 1), Product(16, 128, 2, 3)),
        ((ANY, ANY, 1), Product(32, 64, 4, 3)),
    ),
    scores=(((512,), Scores(32, stages=2)), ((ANY,), Scores(16, stages=2))),
)

H200 = Blocks(
    attend=(
        ((256, 16, 264), Attend(64)),
        ((256, 16, ANY), Attend(64, stages=3)),  # many short rows: more programs side by side win over deeper ones
        ((256, 64, ANY), Attend(64, tile=64, warps=4)),
        ((256, ANY, ANY), Attend(64, tile=128, warps=8)),
        ((512, 16, 264), Attend(32)),
        ((512, 16, ANY), Attend(32, stages=3)),
        ((512, 64, ANY), Attend(32, tile=64, warps=4)),
        ((512, ANY, ANY), Attend(32, tile=128, warps=8)),
        ((ANY, 16, 264), Attend(32)),
        ((ANY, 16, ANY), Attend(32, stages=3)),
        ((ANY, ANY, ANY), Attend(16, tile=64, warps=4, stages=3)),  # wider would not fit its shared memory
    ),
    mass=(
        ((256, 2, 64), Mass()),
        ((256, 2, ANY), Mass(steps=1, lanes=128, stages=1)),
        ((128, 4, ANY), Mass(steps=1, lanes=128, stages=1)),
        ((ANY, ANY, ANY), Mass(block=32, steps=1, lanes=64, warps=4, stages=1)),
    ),
    product=(  # Qwen3-8B's four products at 1, 16 and 64 rows
        ((1, ANY, 0), Product(4, 1024, stages=2, sums=True)),
        ((1, ANY, 1), Product(1, 4096, stages=2, sums=True)),
        ((16, ANY, 0), Product(16, 256, 2, 5)),
        ((16, ANY, 1), Product(32, 64, 2, 8)),
        ((ANY, 6143, 1), Product(32, 128)),
        ((ANY, ANY, 1), Product(64, 128)),
    ),
    scores=(((ANY,), Scores()),),
)

DEVICES = {"NVIDIA H200": H200}
CAPABILITIES = {"9.0": H200}


def blocks() -> Blocks:
    """Those of the card that programs traced now are for; a CPU interprets the H200's."""
    kind, capability = device()
    return DEVICES.get(kind or "NVIDIA H200") or CAPABILITIES.get(capability, SMALL)


def _first[Sizes](rows: Rows[Sizes], *shape: float) -> Sizes:
    return next(sizes for bounds, sizes in rows if all(x <= most for x, most in zip(shape, bounds, strict=True)))


def attend(size: int, itemsize: int, queries: int, pairs: int) -> Attend:
    """By bytes of a token's key (head size, padded, times itemsize), query rows a kv head serves, pairs of row and kv head."""
    return _first(blocks().attend, pow2(size) * itemsize, queries, pairs)


def mass(size: int, itemsize: int, new: int) -> Mass:
    """By head size (padded), bytes of a query's number, new tokens a row."""
    return _first(blocks().mass, pow2(size), itemsize, new)


def product(rows: int, outs: int, gated: bool) -> Product:
    """By rows, outputs, whether two products are gated."""
    return _first(blocks().product, rows, outs, gated)


def scores(size: int, itemsize: int) -> Scores:
    """By bytes of a head's query (head size, padded, times itemsize), as which bounds are multiplied."""
    return _first(blocks().scores, pow2(size) * itemsize)
