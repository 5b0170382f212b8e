"""A layout whose rows are packed once, head by head, in place: from then on heads hold different numbers of rows.

A run of M pages is M * H head pages: page j // H, slice j % H. Head h's packed rows fill `packed[h]` of them, behind those of the
heads before it; what comes later lies on the pages after all packed ones, in slice h as ever. A sequence that was never packed
(`packed` 0) has the usual layout. So a packed layer needs ceil(sum of packed / H) pages, whichever head kept how much.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sejax.cache.compact import compact
from sejax.cache.compose import Layer, Part, owned
from sejax.cache.retention import Retention
from sejax.cache.ring import of_slot
from sejax.kernels import rows as kernel
from sejax.types import HOLE, Array, Hooks, LayerMethod, Rows, State


@dataclasses.dataclass(frozen=True)
class Packed(Layer):
    """Leaves beside Layer's: pages "score" f32[N,H,P], +inf for rows that are never dropped; rows "packed" i32[S,H]."""

    def init(self, slots: int, pages: int, stage: bool = False) -> State:
        state = super().init(slots, pages)
        score = jnp.zeros((pages, self.spec.heads, self.storage.page), jnp.float32)
        packed = jnp.zeros((slots, self.spec.heads), jnp.int32)
        return State(state.pages | {"score": score}, state.rows | {"packed": packed})

    def unscored(self, pos: Array) -> Array:
        return jnp.full(pos.shape, jnp.inf)

    def placed(self, own: dict[str, Any], rows: Rows) -> Rows:
        """The table by head: i32[R,H,M] head pages (page * H + slice), out of range where the run ends."""
        pages, heads, packed = rows.table.shape[1], self.spec.heads, own["packed"][..., None]
        m = jnp.arange(pages, dtype=jnp.int32)
        at = jnp.cumsum(packed, axis=1) - packed + m
        inside = m < packed
        page = jnp.where(inside, at // heads, pages_of(own["packed"])[:, None, None] + m - packed)
        part = jnp.where(inside, at % heads, jnp.arange(heads, dtype=jnp.int32)[:, None])
        entry = jnp.take_along_axis(rows.table[:, None, :], jnp.minimum(page, pages - 1), axis=2) * heads + part
        return rows._replace(table=jnp.where(page < pages, entry, HOLE))

    def pack(self, state: State, rows: Rows, stays: Array, packs: Array) -> State:
        """Keep the rows of stays bool[R,H,M*P], where packs bool[R]. Temporaries: the run's keys and values once, at full length."""
        own = owned(state, rows)
        old, n = self.placed(own, rows), own["n"]
        row = self.all_rows(old)
        stays &= (row < n[..., None]) & packs[:, None, None]
        keep = jnp.sort(jnp.where(stays, row, HOLE), axis=-1)
        keep = jnp.where(keep < HOLE, keep, -1)
        kept = jnp.where(packs[:, None], jnp.sum(stays, axis=-1, dtype=jnp.int32), n)
        packed = jnp.where(packs[:, None], -(-kept // self.storage.page), own["packed"])
        new = self.placed(own | {"packed": packed}, rows)
        keys, pages = self.keys_of(keep, state.pages, Part(state, old, n))
        tokens = {name: leaf for name, leaf in pages.items() if name != "index"}
        pages = pages | jax.tree.map(lambda leaf: compact(leaf, old.table, n, keep, new.table), tokens)
        held = state.rows | {"packed": state.rows["packed"].at[rows.slot].set(packed, mode="drop")}
        return self.moved(pages, held, new, kept, packs, keys)

    def evicting(self, retention: Retention) -> LayerMethod:
        """Prefill in place; a run has a page more than max_len needs, because heads that keep different numbers begin pages apart."""
        prefill = Hooks(self.init, self.write, self.read_all)
        decode = prefill._replace(before_attention=self.read_picked) if self.selection else prefill
        run = lambda max_len: max_len + self.storage.page  # noqa: E731
        return LayerMethod(prefill, decode, run, run, self.storage.page, self.held, used=self.used)

    def held(self, state: State, rows: Rows) -> Array:
        rows = self.placed(owned(state, rows), rows)
        row = self.all_rows(rows)
        pos = kernel.take(state.pages["pos"], rows.table, row)
        return jnp.where((row < of_slot(state.rows["n"], rows)[..., None]) & (pos < HOLE), pos, -1)

    def used(self, state: State, rows: Rows) -> Array:
        return pages_of(of_slot(state.rows["packed"], rows))


def pages_of(packed: Array) -> Array:
    """Pages that packed head pages i32[R,H] take: i32[R]."""
    return -(-jnp.sum(packed, axis=1) // packed.shape[1])
