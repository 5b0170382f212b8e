"""compose(retention, selection, storage): one layer's record from three independent axes. It knows no names.

A run is `capacity` token rows in order of position; row r of a slot is row r % P of page table[r // P]. Retention says
which rows stay, selection which are read, storage how they are stored; only this file and `compact` move rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sejax.cache.compact import compact
from sejax.cache.retention import Candidates, Retention, best
from sejax.cache.ring import join, of_slot, recall, remember
from sejax.cache.selection import Selection
from sejax.cache.storage import Storage
from sejax.kernels import rows as kernel
from sejax.kernels.attention import attend, mass
from sejax.types import HOLE, Array, AttentionView, Hooks, LayerMethod, LayerSpec, Qkv, Rows, Seen, State


def compose(
    spec: LayerSpec,
    storage: Storage,
    retention: Retention | None = None,
    selection: Selection | None = None,
    kind: Callable[..., Layer] | None = None,
) -> LayerMethod:
    """retention None keeps every token; selection None reads every kept token; kind: another layout than Layer's.

    Raises ValueError for what cannot combine.
    """
    if selection is not None and selection.page != storage.page:
        raise ValueError(f"page={selection.page} of the selection differs from the storage's page={storage.page}; give both the same")
    if selection is not None and retention is not None and retention.received:
        raise ValueError("this retention scores tokens by the attention they receive: it cannot go with a selection; read everything")
    layer = (kind or Layer)(spec, storage, retention, selection)
    return layer.keeping() if retention is None else layer.evicting(retention)


class Part(NamedTuple):
    """A stretch of candidates: the first count i32[R,H] rows of a run."""

    state: State
    rows: Rows
    count: Array


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's parts. State: pages {"kv": storage's leaves, "pos" i32[N,H,P] if it evicts, "score" f32[N,H,P] attention
    received, if retention asks, "index": selection's leaves}, rows {"n" i32[S,H] rows held, "dropped" i32[S,H] tokens that
    found no room, "ring" [S,W,H,G,D] last queries, "queries" i32[S] how many of them count, "sums": retention's}. A stage
    that scores has "older" f32[S,H,C] in rows: what the rows of earlier turns received in this one."""

    spec: LayerSpec
    storage: Storage
    retention: Retention | None
    selection: Selection | None

    @property
    def window(self) -> int:
        return self.retention.window if self.retention else 0

    def init(self, slots: int, pages: int, stage: bool = False) -> State:
        spec, rule = self.spec, self.retention
        leaves: dict[str, Any] = {"kv": self.storage.init(spec, pages)}
        rows = {"n": jnp.zeros((slots, spec.heads), jnp.int32), "dropped": jnp.zeros((slots, spec.heads), jnp.int32)}
        if rule:
            leaves["pos"] = jnp.full((pages, spec.heads, self.storage.page), HOLE, jnp.int32)
        if self.selection and not stage:
            leaves["index"] = self.selection.init(spec, pages)
        if self.window:
            rows["ring"] = jnp.zeros((slots, self.window, spec.heads, spec.group, spec.head_dim), spec.dtype)
            rows["queries"] = jnp.zeros(slots, jnp.int32)
        if rule and rule.received:
            leaves["score"] = jnp.zeros((pages, spec.heads, self.storage.page), jnp.float32)
            if stage:
                held = -(-self.run(rule) // self.storage.page) * self.storage.page
                rows["older"] = jnp.zeros((slots, spec.heads, held), jnp.float32)
        if rule and rule.sums:
            rows["sums"] = jax.tree.map(lambda s: jnp.zeros((slots, *s.shape[1:]), s.dtype), rule.sums.shapes(spec))
        return State(leaves, rows)

    def placed(self, own: dict[str, Any], rows: Rows) -> Rows:
        """Rows with the table their token rows lie in; own: the sequences' row leaves [R,...]. Here: the run, for all heads."""
        return rows

    def write(self, state: State, qkv: Qkv, rows: Rows) -> State:
        """Append the new tokens behind row n of each head; what finds no room is dropped and counted."""
        leaves, own = dict(state.pages), dict(state.rows)
        rows = self.placed(owned(state, rows), rows)
        new, room = qkv.k.shape[1], rows.table.shape[-1] * self.storage.page
        row, own["n"], own["dropped"] = kernel.claim(own["n"], own["dropped"], rows.slot, rows.count, new, room)
        leaves["kv"] = self.storage.append(leaves["kv"], rows.table, row, qkv.k, qkv.v)
        if "pos" in leaves:
            pos = jnp.broadcast_to((rows.start[:, None] + jnp.arange(new, dtype=jnp.int32))[..., None], row.shape)
            leaves["pos"] = kernel.put(leaves["pos"], rows.table, row, pos)
            if "score" in leaves:
                leaves["score"] = kernel.put(leaves["score"], rows.table, row, self.unscored(pos))
        if self.selection and "index" in leaves:
            leaves["index"] = self.selection.observe(leaves["index"], rows.table, row, qkv.k.astype(self.spec.dtype))
        if self.window:
            own["ring"] = remember(own["ring"], qkv.q, rows)
            own["queries"] = own["queries"].at[rows.slot].add(rows.count, mode="drop")
        if "sums" in own:
            assert self.retention and self.retention.sums
            added = self.retention.sums.of(self.spec, qkv, rows)
            own["sums"] = jax.tree.map(lambda leaf, x: leaf.at[rows.slot].add(x, mode="drop"), own["sums"], added)
        return State(leaves, own)

    def unscored(self, pos: Array) -> Array:
        """The score of rows just written, at positions i32[R,T,H]."""
        return jnp.zeros(pos.shape)

    def everything(self, state: State, rows: Rows, **fields: Any) -> AttentionView:
        return self.storage.view(state.pages["kv"], ids=rows.table, length=of_slot(state.rows["n"], rows), **fields)

    def read_all(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        rows = self.placed(owned(state, rows), rows)
        return (self.everything(state, rows, own=rows.count, mass=bool(self.retention and self.retention.received)),), carry

    def received(self, state: State, qkv: Qkv, seen: Seen, carry: Any, rows: Rows) -> tuple[State, Any]:
        """Add the attention that each row received to its score; a stage's first view lists the rows of earlier turns."""
        assert self.retention and self.retention.received
        *older, own = (self.retention.received(m) for m in seen.mass if m is not None)
        score, held = state.pages["score"], state.rows
        head = jnp.arange(score.shape[1], dtype=jnp.int32)[:, None]
        by_page = own.reshape(*own.shape[:2], -1, self.storage.page)
        score = score.at[rows.table[:, None, :], head].add(by_page, mode="drop")
        if older:
            held = held | {"older": held["older"].at[rows.slot].add(older[0], mode="drop")}
        return State(state.pages | {"score": score}, held), carry

    def read_picked(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        assert self.selection is not None
        if not self.selection.applies(self.spec, rows.table.shape[1] * self.storage.page):
            return self.read_all(state, qkv, carry, rows)
        rows = self.placed(owned(state, rows), rows)
        picked = self.selection.pick(state.pages["index"], qkv.q[:, 0], rows.table, of_slot(state.rows["n"], rows))
        return (self.storage.view(state.pages["kv"], ids=picked.ids, length=picked.length, run=picked.run),), carry

    def moved(self, pages: dict[str, Any], own: dict[str, Array], rows: Rows, n: Array, changed: Array, keys: Array | None) -> State:
        """The state after the token rows of a run were rewritten where changed bool[R]: the first n i32[R,H] count now.

        keys [R,H,B,D]: the keys of rows 0.. as stored, read before they were rewritten (reading a pool after writing it copies it).
        """
        if self.selection and keys is not None:
            room = rows.table.shape[-1] * self.storage.page
            keys = jnp.pad(keys, [(0, 0), (0, 0), (0, room - keys.shape[2]), (0, 0)])
            table = jnp.where(changed.reshape(-1, *[1] * (rows.table.ndim - 1)), rows.table, HOLE)
            pages = pages | {"index": self.selection.rebuild(pages["index"], table, n, keys)}
        return State(pages, own | {"n": own["n"].at[rows.slot].set(n, mode="drop")})

    def keys_of(self, keep: Array, pages: dict[str, Any], *parts: Part) -> tuple[Array | None, dict[str, Any]]:
        """Keys [R,H,B,D] of the ranks that `keep` i32[R,H,B] names over the parts' rows, for the selection's index (None without one).

        `pages`, which are to be rewritten, come back ordered behind this read. Without that XLA may read the keys again where the index
        takes them, after the rewriting, and copy the pool for it.
        """
        if not self.selection:
            return None, pages
        keys = self.storage.keys(parts[0].state.pages["kv"], parts[0].rows.table, keep)
        if len(parts) == 2:
            before = parts[0].count[..., None]
            new = self.storage.keys(parts[1].state.pages["kv"], parts[1].rows.table, keep - before)
            keys = jnp.where((keep < before)[..., None], keys, new.astype(keys.dtype))
        return lax.optimization_barrier((keys, pages))

    def all_rows(self, rows: Rows) -> Array:
        """Physical row numbers of a run: i32[R,H,M*P]."""
        row = jnp.arange(rows.table.shape[-1] * self.storage.page, dtype=jnp.int32)
        return jnp.broadcast_to(row, (rows.slot.shape[0], self.spec.heads, row.shape[0]))

    def keeping(self) -> LayerMethod:
        """Every token stays: row = position, prefill writes in place."""

        def held(state: State, rows: Rows) -> Array:
            row = self.all_rows(rows)
            return jnp.where(row < of_slot(state.rows["n"], rows)[..., None], row, -1)

        def truncate(state: State, rows: Rows) -> State:
            before = of_slot(state.rows["n"], rows)
            n = jnp.minimum(before, rows.start[:, None])
            keys, pages = self.keys_of(self.all_rows(rows), state.pages, Part(state, rows, before))
            return self.moved(pages, state.rows, rows, n, jnp.any(n < before, axis=-1), keys)

        prefill = Hooks(self.init, self.write, self.read_all)
        decode = prefill._replace(before_attention=self.read_picked) if self.selection else prefill
        whole = lambda max_len: max_len  # noqa: E731
        return LayerMethod(prefill, decode, whole, whole, self.storage.page, held, truncate=truncate)

    def evicting(self, retention: Retention) -> LayerMethod:
        """Prefill fills a stage; a seal keeps the best of (held and new) rows once they exceed what the run may hold."""

        def history(state: State, qkv: Qkv, rows: Rows) -> tuple[AttentionView, ...]:
            return (self.everything(state, self.placed(owned(state, rows), rows), mass=bool(retention.received)),)

        def held(state: State, rows: Rows) -> Array:
            rows = self.placed(owned(state, rows), rows)
            row = self.all_rows(rows)
            pos = kernel.take(state.pages["pos"], rows.table, row)
            return jnp.where((row < of_slot(state.rows["n"], rows)[..., None]) & (pos < HOLE), pos, -1)

        def due(state: State, rows: Rows) -> Array:
            own = owned(state, rows)
            limit = self.limit(retention, own, rows.start + rows.count)
            return jnp.any(own["n"] >= limit, axis=-1) & (rows.slot < state.rows["n"].shape[0])

        def seal(stage: State, state: State, staged: Rows, old: Rows, new: Rows) -> State:
            return self.seal(retention, stage, state, staged, old, new)

        def trim(state: State, rows: Rows) -> State:
            return self.trim(retention, state, rows, due(state, rows))

        def cut(state: State, hidden: Array, carry: Any, rows: Rows) -> tuple[State, Array, Any]:
            assert retention.staged
            over = jnp.any(owned(state, rows)["n"] > retention.staged, axis=-1)
            rule = retention._replace(budget=retention.staged, count=None, budget_at=None)
            return self.trim(rule, state, rows, over), hidden, carry

        stage = Hooks(lambda slots, pages: self.init(slots, pages, stage=True), self.write, self.read_all)
        stage = stage._replace(after_layer=cut) if retention.staged else stage
        reads = self.read_picked if self.selection else self.read_all
        decode = Hooks(self.init, self.write, reads, after_step=None if retention.endless else trim)
        if retention.received:
            stage, decode = (hooks._replace(after_attention=self.received) for hooks in (stage, decode))
        run = lambda _: self.run(retention)  # noqa: E731
        full = None if retention.endless else due
        return LayerMethod(stage, decode, run, lambda max_len: max_len, self.storage.page, held, history, seal, full)

    def run(self, retention: Retention) -> int:
        """Token rows of a run."""
        return max(retention.budget + retention.slack, self.spec.max_len if retention.endless else 0)

    def limit(self, retention: Retention, own: dict[str, Any], length: Array) -> Array | int:
        """Rows, of each head or of all, from which on the next seal or trim is due at a logical length i32[R]."""
        return retention.rows(length) + retention.slack

    def must(self, retention: Retention, own: dict[str, Any], total: Array, length: Array) -> Array:
        """bool[R,H]: heads that a turn's end leaves with more candidates than may stay."""
        return total >= jnp.where(own["n"] == 0, retention.quota(total, length) + 1, self.limit(retention, own, length))

    def decide(self, retention: Retention, scores: Array, total: Array, window: Array, length: Array, room: int) -> tuple[Array, Array]:
        """Ranks to keep i32[R,H,room] and their number i32[R,H]."""
        quota = retention.quota(total, length)
        return best(scores, total, quota, retention.budget, room), quota

    def dealt(self, retention: Retention, own: dict[str, Any], quota: Array, changed: Array) -> dict[str, Any]:
        """Row leaves [R,...] that a decision changes, where changed bool[R,H]."""
        return {}

    def scores(self, retention: Retention, parts: tuple[Part, ...], own: dict[str, Any], rows: Rows, window: Array) -> Array:
        """Scores f32[R,H,C] in rank space of what the parts hold; own: the sequences' row leaves [R,...]."""
        total = parts[0].count + parts[1].count if len(parts) == 2 else parts[0].count

        def laid(fetch: Callable[[Part], Array]) -> Array:
            found = [fetch(part) for part in parts]
            return in_order(found[0], found[1], parts[0].count) if len(found) == 2 else found[0]

        def read(name: str) -> Array:
            if name in ("keys", "values"):
                of = self.storage.keys if name == "keys" else self.storage.values
                return laid(lambda p: of(p.state.pages["kv"], p.rows.table, self.all_rows(p.rows)))
            return laid(lambda p: kernel.take(p.state.pages[name], p.rows.table, self.all_rows(p.rows)))

        seen = queries = None
        if self.window:
            queries, q_pos = recall(own["ring"], rows.start + rows.count, self.window)
            real = jnp.arange(self.window) >= self.window - window[:, None]
            views = [self.everything(p.state, p.rows, pos=p.state.pages["pos"], q_pos=q_pos) for p in parts]
            lse = functools.reduce(jnp.logaddexp, [attend(queries, v)[1] for v in views])
            found = iter([jnp.moveaxis(mass(queries, v, lse, real), 3, 2) for v in views])
            seen = jnp.moveaxis(laid(lambda _: next(found)), 2, 3)
        return retention.score(Candidates(total, seen, window, rows.start + rows.count, queries, read, own.get("sums")))

    def seal(self, retention: Retention, stage: State, state: State, staged: Rows, old: Rows, new: Rows) -> State:
        """Store a turn: what the rule keeps of (held rows of `old`, this turn's staged rows) becomes the run of `new`."""
        own = owned(state, old)
        old, before = self.placed(own, old), own["n"]
        fresh = of_slot(stage.rows["n"], staged)
        total = before + fresh
        length = new.start + new.count
        must = self.must(retention, own, total, length)
        everything = self.all_rows(old)
        room = everything.shape[-1]
        everything = jnp.where(everything < total[..., None], everything, -1)
        window = jnp.minimum(self.window, new.count)
        if self.window:
            own["ring"] = join(state.rows["ring"], of_slot(stage.rows["ring"], staged), old, new, self.window)
            own["queries"] = jnp.where(new.count > 0, window, own["queries"])
        if "sums" in state.rows:
            both = (state.rows["sums"], stage.rows["sums"])
            own["sums"] = jax.tree.map(lambda a, b: of_slot(a, old) + of_slot(b, staged), *both)
        if "score" in state.pages:  # what earlier turns' rows received in this one arrives with their seal
            head = jnp.arange(before.shape[1])[:, None]
            more = of_slot(stage.rows["older"], staged)
            more = jnp.where((new.count > 0)[:, None, None], more, 0).reshape(*before.shape, -1, self.storage.page)
            score = state.pages["score"].at[old.table[:, None, :], head].add(more, mode="drop")
            state = State(state.pages | {"score": score}, state.rows)

        parts = (Part(state, old, before), Part(stage, staged, fresh))

        def ranked() -> tuple[Array, Array]:
            return self.decide(retention, self.scores(retention, parts, own, new, window), total, window, length, room)

        keep, quota = lax.cond(jnp.any(must & (new.count[:, None] > 0)), ranked, lambda: (everything, total))
        keep = jnp.where(must[..., None], keep, everything)
        moves = new.count > 0  # a turn of nothing leaves the run bit-equal, unless it also moves to another slot
        moves |= old.slot != new.slot
        keep = jnp.where(moves[:, None, None], keep, -1)
        kept = jnp.where(must, jnp.minimum(total, quota), total)
        kept = jnp.where(moves[:, None], kept, before)
        own |= self.dealt(retention, own, quota, must & moves[:, None])
        held = jax.tree.map(lambda leaf, x: leaf.at[new.slot].set(x, mode="drop"), state.rows, own)
        new = self.placed(own, new)

        def move(leaf: Array, fresh: Array) -> Array:
            return compact(leaf, old.table, before, keep, new.table, fresh, staged.table)

        keys, pages = self.keys_of(keep, state.pages, *parts)
        pages = pages | jax.tree.map(move, {k: pages[k] for k in stage.pages}, stage.pages)
        return self.moved(pages, held, new, kept, moves, keys)

    def trim(self, retention: Retention, state: State, rows: Rows, due: Array) -> State:
        """Seal in place while decoding: rows that are not due stay bit-equal."""
        own = owned(state, rows)
        old, n = self.placed(own, rows), own["n"]
        window = jnp.full_like(rows.count, self.window)
        if self.window and retention.restart:
            window = jnp.minimum(own["queries"], window)
        part = Part(state, old, n)

        def ranked() -> tuple[Array, Array]:
            scores = self.scores(retention, (part,), own, rows, window)
            return self.decide(retention, scores, n, window, rows.start + rows.count, retention.budget)

        nothing = jnp.full((*n.shape, retention.budget), -1, jnp.int32)
        keep, quota = lax.cond(jnp.any(due), ranked, lambda: (nothing, n))
        keep = jnp.where(due[:, None, None], keep, -1)
        kept = jnp.where(due[:, None], jnp.minimum(n, quota), n)
        changes = self.dealt(retention, own, quota, jnp.broadcast_to(due[:, None], n.shape))
        held = state.rows | {k: state.rows[k].at[rows.slot].set(x, mode="drop") for k, x in changes.items()}
        new = self.placed(own | changes, rows)
        keys, pages = self.keys_of(keep, state.pages, part)
        token = {k: v for k, v in pages.items() if k != "index"}
        pages = pages | jax.tree.map(lambda leaf: compact(leaf, old.table, n, keep, new.table), token)
        return self.moved(pages, held, new, kept, due, keys)


def owned(state: State, rows: Rows) -> dict[str, Any]:
    """The row leaves of the sequences a call touches, [R,...]."""
    return jax.tree.map(lambda leaf: of_slot(leaf, rows), state.rows)


def in_order(old: Array, new: Array, before: Array) -> Array:
    """Join what two parts list, each [R,H,C_i,...], by rank: `before` i32[R,H] of the first count -> [R,H,C_0+C_1,...]."""
    width = old.shape[2] + new.shape[2]
    rank = jnp.arange(width, dtype=jnp.int32)
    source = jnp.where(rank < before[..., None], rank, rank - before[..., None] + old.shape[2])
    source = jnp.clip(source, 0, width - 1).reshape(*before.shape, width, *([1] * (old.ndim - 3)))
    return jnp.take_along_axis(jnp.concatenate([old, new], axis=2), source, axis=2)
