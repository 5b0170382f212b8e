"""compose(retention, selection, storage): one layer's record from three independent axes. It knows no names.

A run is `capacity` token rows in order of position; row r of a slot is row r % P of page table[r // P]. Retention says
which rows stay, selection which are read, storage how they are stored; only this file and `compact` move rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sejax.cache.compact import compact
from sejax.cache.retention import Candidates, Retention, best
from sejax.cache.selection import Selection
from sejax.cache.storage import Storage
from sejax.kernels import rows as kernel
from sejax.kernels.attention import attend, mass
from sejax.types import HOLE, Array, AttentionView, Hooks, LayerMethod, LayerSpec, Qkv, Rows, State


def compose(spec: LayerSpec, storage: Storage, retention: Retention | None = None, selection: Selection | None = None) -> LayerMethod:
    """retention None keeps every token; selection None reads every kept token. Raises ValueError for what cannot combine."""
    if selection is not None and selection.page != storage.page:
        raise ValueError(f"page={selection.page} of the selection differs from the storage's page={storage.page}; give both the same")
    layer = Layer(spec, storage, retention, selection)
    return layer.keeping() if retention is None else layer.evicting(retention)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's parts. State: pages {"kv": storage's leaves, "pos" i32[N,H,P] if it evicts, "index": selection's
    leaves}, rows {"n" i32[S,H] rows held, "dropped" i32[S,H] tokens that found no room, "ring" [S,W,H,G,D] queries}."""

    spec: LayerSpec
    storage: Storage
    retention: Retention | None
    selection: Selection | None

    @property
    def window(self) -> int:
        return self.retention.window if self.retention else 0

    def init(self, slots: int, pages: int, select: bool = True) -> State:
        spec = self.spec
        leaves: dict[str, Any] = {"kv": self.storage.init(spec, pages)}
        if self.retention:
            leaves["pos"] = jnp.full((pages, spec.heads, self.storage.page), HOLE, jnp.int32)
        if self.selection and select:
            leaves["index"] = self.selection.init(spec, pages)
        rows = {"n": jnp.zeros((slots, spec.heads), jnp.int32), "dropped": jnp.zeros((slots, spec.heads), jnp.int32)}
        if self.window:
            rows["ring"] = jnp.zeros((slots, self.window, spec.heads, spec.group, spec.head_dim), spec.dtype)
        return State(leaves, rows)

    def write(self, state: State, qkv: Qkv, rows: Rows) -> State:
        """Append the new tokens behind row n of each head; what finds no room is dropped and counted."""
        leaves, own = dict(state.pages), dict(state.rows)
        n = of_slot(own["n"], rows)
        new = jnp.arange(qkv.k.shape[1], dtype=jnp.int32)
        row = n[:, None, :] + new[None, :, None]  # [R,T,H]
        room = rows.table.shape[1] * self.storage.page
        real = (new < rows.count[:, None])[..., None]
        row = jnp.where(real & (row < room), row, -1)
        leaves["kv"] = self.storage.append(leaves["kv"], rows.table, row, qkv.k, qkv.v)
        if "pos" in leaves:
            pos = jnp.broadcast_to((rows.start[:, None] + new)[..., None], row.shape)
            leaves["pos"] = kernel.put(leaves["pos"], rows.table, row, pos)
        if self.selection and "index" in leaves:
            leaves["index"] = self.selection.observe(leaves["index"], rows.table, row, qkv.k.astype(self.spec.dtype))
        held = jnp.minimum(n + rows.count[:, None], room)
        own["n"] = own["n"].at[rows.slot].set(held, mode="drop")
        own["dropped"] = own["dropped"].at[rows.slot].add(n + rows.count[:, None] - held, mode="drop")
        if self.window:
            own["ring"] = remember(own["ring"], qkv.q, rows)
        return State(leaves, own)

    def everything(self, state: State, rows: Rows, **fields: Any) -> AttentionView:
        return self.storage.view(state.pages["kv"], ids=rows.table, length=of_slot(state.rows["n"], rows), **fields)

    def read_all(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        return (self.everything(state, rows, own=rows.count),), carry

    def read_picked(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        assert self.selection is not None
        if not self.selection.applies(self.spec, rows.table.shape[1] * self.storage.page):
            return self.read_all(state, qkv, carry, rows)
        picked = self.selection.pick(state.pages["index"], qkv.q[:, 0], rows.table, of_slot(state.rows["n"], rows))
        return (self.storage.view(state.pages["kv"], ids=picked.ids, length=picked.length, run=picked.run),), carry

    def moved(self, pages: dict[str, Any], own: dict[str, Array], rows: Rows, n: Array, changed: Array) -> State:
        """The state after the token rows of a run were rewritten where changed bool[R]; n i32[R,H] of them count now."""
        if self.selection:
            keys = self.storage.keys(pages["kv"], rows.table, self.all_rows(rows))
            table = jnp.where(changed[:, None], rows.table, jax.tree.leaves(pages)[0].shape[0])
            pages = pages | {"index": self.selection.rebuild(pages["index"], table, n, keys)}
        return State(pages, own | {"n": own["n"].at[rows.slot].set(n, mode="drop")})

    def all_rows(self, rows: Rows) -> Array:
        """Physical row numbers of a run: i32[R,H,M*P]."""
        row = jnp.arange(rows.table.shape[1] * self.storage.page, dtype=jnp.int32)
        return jnp.broadcast_to(row, (rows.slot.shape[0], self.spec.heads, row.shape[0]))

    def keeping(self) -> LayerMethod:
        """Every token stays: row = position, prefill writes in place."""

        def held(state: State, rows: Rows) -> Array:
            row = self.all_rows(rows)
            return jnp.where(row < of_slot(state.rows["n"], rows)[..., None], row, -1)

        def truncate(state: State, rows: Rows) -> State:
            before = of_slot(state.rows["n"], rows)
            n = jnp.minimum(before, rows.start[:, None])
            return self.moved(state.pages, state.rows, rows, n, jnp.any(n < before, axis=-1))

        prefill = Hooks(self.init, self.write, self.read_all)
        decode = prefill._replace(before_attention=self.read_picked) if self.selection else prefill
        whole = lambda max_len: max_len  # noqa: E731
        return LayerMethod(prefill, decode, whole, whole, self.storage.page, held, truncate=truncate)

    def evicting(self, retention: Retention) -> LayerMethod:
        """Prefill fills a stage; a seal keeps `budget` of (held and new) rows once they exceed what the run may hold."""
        capacity = retention.budget + retention.slack

        def history(state: State, qkv: Qkv, rows: Rows) -> tuple[AttentionView, ...]:
            return (self.everything(state, rows),)

        def held(state: State, rows: Rows) -> Array:
            row = self.all_rows(rows)
            pos = kernel.take(state.pages["pos"], rows.table, row)
            return jnp.where((row < of_slot(state.rows["n"], rows)[..., None]) & (pos < HOLE), pos, -1)

        def due(state: State, rows: Rows) -> Array:
            return jnp.any(of_slot(state.rows["n"], rows) >= capacity, axis=-1) & (rows.slot < state.rows["n"].shape[0])

        def seal(stage: State, state: State, staged: Rows, old: Rows, new: Rows) -> State:
            return self.seal(retention, stage, state, staged, old, new)

        def trim(state: State, rows: Rows) -> State:
            return self.trim(retention, state, rows, due(state, rows))

        stage = Hooks(lambda slots, pages: self.init(slots, pages, select=False), self.write, self.read_all)
        reads = self.read_picked if self.selection else self.read_all
        decode = Hooks(self.init, self.write, reads, after_step=trim)
        return LayerMethod(stage, decode, lambda _: capacity, lambda max_len: max_len, self.storage.page, held, history, seal, due)

    def scores(
        self,
        retention: Retention,
        ring: Array | None,
        views: tuple[AttentionView, ...],
        counts: tuple[Array, ...],
        rows: Rows,
        window: Array,
    ) -> Array:
        """Scores in rank space of the rows that `views` list (each lists counts[i] i32[R,H] of them)."""
        total = counts[0] + counts[1] if len(counts) == 2 else counts[0]
        if ring is None:
            width = sum(v.ids.shape[-1] * v.run for v in views)
            return retention.score(Candidates(total, None, window)) + jnp.zeros((*total.shape, width), jnp.float32)
        end = rows.start + rows.count
        q, q_pos = recall(ring, end, self.window)
        real = jnp.arange(self.window) >= self.window - window[:, None]
        views = tuple(v.replace(q_pos=q_pos) for v in views)
        parts = [attend(q, v) for v in views]
        lse = _merge_lse([part for _, part in parts])
        per_view = [mass(q, v, lse, real) for v in views]
        joined = per_view[0] if len(per_view) == 1 else _by_rank(per_view[0], per_view[1], counts[0], total)
        return retention.score(Candidates(total, joined, window))

    def seal(self, retention: Retention, stage: State, state: State, staged: Rows, old: Rows, new: Rows) -> State:
        """Store a turn: what the rule keeps of (held rows of `old`, this turn's staged rows) becomes the run of `new`."""
        capacity = retention.budget + retention.slack
        own = dict(state.rows)
        before = of_slot(own["n"], old)
        fresh = jnp.broadcast_to(staged.count[:, None], before.shape)
        total = before + fresh
        limit = jnp.where(before == 0, retention.budget + 1, capacity)
        must = total >= limit
        everything = self.all_rows(new)
        room = everything.shape[-1]
        everything = jnp.where(everything < total[..., None], everything, -1)
        window = jnp.minimum(self.window, new.count)
        ring = join(own["ring"], of_slot(stage.rows["ring"], staged), old, new, self.window) if self.window else None

        def ranked() -> Array:
            views = (
                self.everything(state, old, pos=state.pages["pos"]),
                self.everything(stage, staged, pos=stage.pages["pos"]),
            )
            scores = self.scores(retention, ring, views, (before, fresh), new, window)
            return best(scores, total, retention.budget, room)

        keep = lax.cond(jnp.any(must & (new.count[:, None] > 0)), ranked, lambda: everything)
        keep = jnp.where(must[..., None], keep, everything)
        moves = new.count > 0  # a turn of nothing leaves the run bit-equal, unless it also moves to another slot
        moves |= old.slot != new.slot
        keep = jnp.where(moves[:, None, None], keep, -1)
        kept = jnp.where(must, jnp.minimum(total, retention.budget), total)
        kept = jnp.where(moves[:, None], kept, before)
        own["dropped"] = own["dropped"].at[new.slot].set(of_slot(own["dropped"], old), mode="drop")
        if ring is not None:
            own["ring"] = own["ring"].at[new.slot].set(ring, mode="drop")

        def move(leaf: Array, fresh: Array) -> Array:
            return compact(leaf, old.table, before, keep, new.table, fresh, staged.table)

        pages = state.pages | jax.tree.map(move, {k: state.pages[k] for k in stage.pages}, stage.pages)
        return self.moved(pages, own, new, kept, moves)

    def trim(self, retention: Retention, state: State, rows: Rows, due: Array) -> State:
        """Seal in place while decoding: rows that are not due stay bit-equal."""
        n = of_slot(state.rows["n"], rows)
        ring = of_slot(state.rows["ring"], rows) if self.window else None
        view = self.everything(state, rows, pos=state.pages["pos"])
        window = jnp.full_like(rows.count, self.window)
        scores = self.scores(retention, ring, (view,), (n,), rows, window)
        keep = best(scores, n, retention.budget, retention.budget)
        keep = jnp.where(due[:, None, None], keep, -1)
        kept = jnp.where(due[:, None], jnp.minimum(n, retention.budget), n)
        token = {k: v for k, v in state.pages.items() if k != "index"}
        pages = state.pages | jax.tree.map(lambda leaf: compact(leaf, rows.table, n, keep, rows.table), token)
        return self.moved(pages, state.rows, rows, kept, due)


def of_slot(leaf: Array, rows: Rows) -> Array:
    """leaf [S,...] -> [R,...]; a padding row (slot S) reads zeros: a sequence that holds nothing yet."""
    return leaf.at[rows.slot].get(mode="fill", fill_value=0)


def remember(ring: Array, q: Array, rows: Rows) -> Array:
    """Keep each row's last W queries: position p lies at p % W. ring [S,W,H,G,D], q [R,T,H,G,D] -> ring."""
    width, new = ring.shape[1], jnp.arange(q.shape[1], dtype=jnp.int32)
    last = (new < rows.count[:, None]) & (new >= rows.count[:, None] - width)
    at = jnp.where(last, (rows.start[:, None] + new) % width, width)
    return ring.at[rows.slot[:, None], at].set(q.astype(ring.dtype), mode="drop")


def recall(ring: Array, end: Array, width: int) -> tuple[Array, Array]:
    """The last W queries in order and their positions: ring [R,W,...], end i32[R] -> [R,W,...], i32[R,W]."""
    pos = end[:, None] - width + jnp.arange(width, dtype=jnp.int32)
    at = (pos % width).reshape(*pos.shape, *([1] * (ring.ndim - 2)))
    return jnp.take_along_axis(ring, at, axis=1), pos


def join(ring: Array, fresh: Array, old: Rows, new: Rows, width: int) -> Array:
    """The query ring after a turn: this turn's queries where it has them, older ones elsewhere. -> [R,W,H,G,D]."""
    end = (new.start + new.count)[:, None]
    index = jnp.arange(width, dtype=jnp.int32)
    pos = end - 1 - (end - 1 - index) % width  # newest position below `end` that lies at this index
    mine = (pos >= new.start[:, None]).reshape(*pos.shape, 1, 1, 1)
    return jnp.where(mine, fresh, of_slot(ring, old))


def _merge_lse(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.logaddexp(parts[0], parts[1])


def _by_rank(old: Array, new: Array, before: Array, total: Array) -> Array:
    """Lay two views' masses [R,H,G,C0], [R,H,G,C1] out in rank order -> [R,H,G,C0+C1]; ranks past total get 0."""
    width = old.shape[-1] + new.shape[-1]
    rank = jnp.arange(width, dtype=jnp.int32)
    source = jnp.where(rank < before[..., None], rank, rank - before[..., None] + old.shape[-1])
    source = jnp.clip(source, 0, width - 1)[:, :, None, :]
    both = jnp.concatenate([old, new], axis=-1)
    laid = jnp.take_along_axis(both, jnp.broadcast_to(source, both.shape), axis=-1)
    return jnp.where((rank < total[..., None])[:, :, None, :], laid, 0.0)
