"""Which of the kept tokens a decode step reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sejax.cache.storage import Leaves
from sejax.types import Array, LayerSpec


class Picked(NamedTuple):
    """Entries to read, ascending: ids i32[R,H,M] head-page entries of `run` tokens, length i32[R,H] listed tokens."""

    ids: Array
    run: int
    length: Array


class Selection(NamedTuple):
    """An index over stored rows, kept beside them in its own page leaves.

    page: the storage's page this selection was made for
    applies(spec, rows of a run) -> whether this layer selects at all (a static decision)
    init(spec, pages) -> page leaves
    observe(leaves, table, row i32[R,T,H], keys [R,T,H,D] as stored) -> leaves; negative rows are padding
    rebuild(leaves, table, n i32[R,H], keys [R,H,B,D] of rows 0..B-1) -> leaves; after rows moved
    pick(leaves, q [R,H,G,D], table, n i32[R,H]) -> Picked
    """

    page: int
    applies: Callable[[LayerSpec, int], bool]
    init: Callable[[LayerSpec, int], Leaves]
    observe: Callable[[Leaves, Array, Array, Array], Leaves]
    rebuild: Callable[[Leaves, Array, Array, Array], Leaves]
    pick: Callable[[Leaves, Array, Array, Array], Picked]
