"""Keep the first tokens and the most recent ones."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from sejax.cache.compact import compact
from sejax.cache.compose import Layer
from sejax.cache.method import Parts, check
from sejax.cache.ring import of_slot
from sejax.cache.storage import Storage, raw
from sejax.kernels import rows as kernel
from sejax.types import HOLE, Array, AttentionView, Hooks, LayerMethod, LayerSpec, Method, Qkv, Rows, State


def streamingllm(
    sinks: int = 4,
    recent: int = 2044,
    positions: Literal["cache", "true"] = "cache",
    prefill: Literal["dense", "window"] = "dense",
    page: int = 16,
) -> Method:
    """Keep the first `sinks` tokens and the last `recent` ones; everything between is dropped.

    kept(L) = [0, sinks) + [L - recent, L); with positions "cache" a sink's key sees its query at position
    min(p, sinks + recent - 1), the index the query has inside the cache.

    Family: eviction
    Paper: Xiao et al. 2023, arXiv 2309.17453.
    Differs: keys are stored rotated at their true positions; renumbering is done by rotating the query that meets the
        sinks, which gives the same logits. Within a prompt every query sees the whole prompt (prefill "dense") and all
        that was held before it; the paper's evaluation streams (prefill "window").
    Keeps: at most sinks + recent tokens per kv head and layer, the current one included.

    Args:
        sinks: first tokens that are always kept.
        recent: latest tokens that are kept.
        positions: "cache": positions inside the cache, as in the paper; "true": original positions.
        prefill: "dense": a prompt attends to all of itself; "window": each of its queries sees sinks and the last `recent`.
        page: tokens a page of the pool.
    """
    check(sinks >= 0, f"sinks={sinks} must be >= 0")
    check(recent >= 1, f"recent={recent} must be at least 1: the current token is one of them")
    check(positions in ("cache", "true"), f'positions={positions!r} must be "cache" or "true"')
    check(prefill in ("dense", "window"), f'prefill={prefill!r} must be "dense" or "window"')
    arguments = dict(sinks=sinks, recent=recent, positions=positions, prefill=prefill, page=page)

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        ring = _Ring(spec, raw(page), sinks, recent, positions == "cache")
        stage = Layer(spec, raw(page), None, None)
        views = ring.staged_window if prefill == "window" else stage.read_all
        history = ring.window_history if prefill == "window" else ring.history
        return LayerMethod(
            Hooks(ring.init, ring.stage_write, views),
            Hooks(ring.init, ring.write, lambda state, qkv, carry, rows: (ring.history(state, qkv, rows), carry)),
            run=lambda _: ring.rows,
            stage_run=lambda max_len: max_len,
            page=page,
            held=ring.held,
            history=history,
            seal=ring.seal,
        )

    refuses = [("selection", "all that is kept is read; use it alone")]
    if prefill == "window":
        refuses.append(("reading", "a prompt's queries see a window already, nothing is left to skip; use prefill=dense"))
    parts = Parts(raw(page), traits=frozenset({"retention"}), refuses=tuple(refuses))
    return Method("streamingllm", tuple(arguments.items()), layer, "layer", parts=parts)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Sinks on pages of their own, then a ring: position p >= sinks lies at ring row (p - sinks) % recent."""

    spec: LayerSpec
    storage: Storage
    sinks: int
    recent: int
    renumber: bool

    @property
    def base(self) -> int:
        """First physical row of the ring."""
        return -(-self.sinks // self.storage.page) * self.storage.page

    @property
    def rows(self) -> int:
        return self.base + self.recent

    def init(self, slots: int, pages: int) -> State:
        pos = jnp.full((pages, self.spec.heads, self.storage.page), HOLE, jnp.int32)
        n = jnp.zeros((slots, self.spec.heads), jnp.int32)
        return State({"kv": self.storage.init(self.spec, pages), "pos": pos}, {"n": n})

    def store(self, state: State, qkv: Qkv, rows: Rows, row: Array, n: Array) -> State:
        pos = rows.start[:, None] + jnp.arange(row.shape[1], dtype=jnp.int32)
        row = jnp.where((jnp.arange(row.shape[1]) < rows.count[:, None])[..., None], row, -1)
        kv = self.storage.append(state.pages["kv"], rows.table, row, qkv.k, qkv.v)
        pos = kernel.put(state.pages["pos"], rows.table, row, jnp.broadcast_to(pos[..., None], row.shape))
        return State({"kv": kv, "pos": pos}, {"n": state.rows["n"].at[rows.slot].set(n, mode="drop")})

    def write(self, state: State, qkv: Qkv, rows: Rows) -> State:
        """Decode: the new token takes the place of the oldest recent one."""
        pos = rows.start[:, None] + jnp.arange(qkv.k.shape[1], dtype=jnp.int32)
        row = jnp.where(pos < self.sinks, pos, self.base + (pos - self.sinks) % self.recent)
        n = jnp.minimum(rows.start + rows.count, self.sinks + self.recent)[:, None]
        return self.store(state, qkv, rows, self.every_head(row), jnp.broadcast_to(n, (row.shape[0], self.spec.heads)))

    def stage_write(self, state: State, qkv: Qkv, rows: Rows) -> State:
        n = of_slot(state.rows["n"], rows)
        row = n[:, None, :] + jnp.arange(qkv.k.shape[1], dtype=jnp.int32)[None, :, None]
        return self.store(state, qkv, rows, row, n + rows.count[:, None])

    def every_head(self, row: Array) -> Array:
        return jnp.broadcast_to(row[..., None], (*row.shape, self.spec.heads))

    def sink_query(self, qkv: Qkv, rows: Rows) -> Array | None:
        """Queries as the sinks see them, or None if that is as all others do."""
        if not self.renumber:
            return None
        pos = rows.start[:, None] + jnp.arange(qkv.q.shape[1], dtype=jnp.int32)
        return self.spec.rope(qkv.q_raw, jnp.minimum(pos, self.sinks + self.recent - 1)).astype(qkv.q.dtype)

    def history(self, state: State, qkv: Qkv, rows: Rows) -> tuple[AttentionView, ...]:
        """Everything held: two views, since the sinks' queries may be rotated differently."""
        n, split = of_slot(state.rows["n"], rows)[:, 0], self.base // self.storage.page
        recent = self.storage.view(state.pages["kv"], ids=rows.table[:, split:], length=jnp.maximum(n - self.sinks, 0))
        if not self.sinks:
            return (recent,)
        length = jnp.minimum(n, self.sinks)
        return (self.storage.view(state.pages["kv"], ids=rows.table[:, :split], length=length, q=self.sink_query(qkv, rows)), recent)

    def windowed(self, view: AttentionView, pos: Array, qkv: Qkv, rows: Rows) -> AttentionView:
        q_pos = rows.start[:, None] + jnp.arange(qkv.q.shape[1], dtype=jnp.int32)
        return view.replace(pos=pos, q_pos=q_pos, window=self.recent)

    def window_history(self, state: State, qkv: Qkv, rows: Rows) -> tuple[AttentionView, ...]:
        *sinks, recent = self.history(state, qkv, rows)
        return (*sinks, self.windowed(recent, state.pages["pos"], qkv, rows))

    def staged_window(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        """This turn's tokens: its sinks (if it holds any) and the last `recent` before each query."""
        n = of_slot(state.rows["n"], rows)[:, 0]
        turn_start = rows.start + rows.count - n
        own_sinks = jnp.clip(self.sinks - turn_start, 0, n)
        recent = self.storage.view(state.pages["kv"], ids=rows.table, length=n, first=own_sinks)
        recent = self.windowed(recent, state.pages["pos"], qkv, rows)
        if not self.sinks:
            return (recent,), carry
        ids = rows.table[:, : self.base // self.storage.page]
        sinks = self.storage.view(state.pages["kv"], ids=ids, length=own_sinks, q=self.sink_query(qkv, rows))
        return (sinks.replace(pos=state.pages["pos"], q_pos=recent.q_pos), recent), carry

    def holds(self, length: Array) -> Array:
        """Position each physical row holds when the sequence has `length` tokens: i32[R] -> i32[R,rows], -1 empty."""
        row, end = jnp.arange(self.rows, dtype=jnp.int32), length[:, None]
        ring = end - 1 - (end - 1 - self.sinks - (row - self.base)) % self.recent
        ring = jnp.where(ring >= self.sinks, ring, -1)
        sink = jnp.where((row < self.sinks) & (row < end), row, -1)
        return jnp.where(row < self.base, sink, ring)

    def held(self, state: State, rows: Rows) -> Array:
        row = jnp.arange(rows.table.shape[1] * self.storage.page, dtype=jnp.int32)
        n = of_slot(state.rows["n"], rows)[..., None]
        real = jnp.where(row < self.base, row < jnp.minimum(n, self.sinks), row - self.base < n - self.sinks)
        at = jnp.broadcast_to(row, real.shape)
        return jnp.where(real, kernel.take(state.pages["pos"], rows.table, at), -1)

    def seal(self, stage: State, state: State, staged: Rows, old: Rows, new: Rows) -> State:
        """What the sequence holds after this turn: staged rows where they are newer, else the old row at the same place."""
        end = new.start + new.count
        pos = self.holds(end)
        row = jnp.arange(self.rows, dtype=jnp.int32)
        keep = jnp.where(pos >= new.start[:, None], self.rows + pos - new.start[:, None], row)
        keep = jnp.where((pos >= 0) & ((pos >= new.start[:, None]) | (old.slot != new.slot)[:, None]), keep, -1)
        keep = jnp.broadcast_to(keep[:, None], (keep.shape[0], self.spec.heads, self.rows))
        limit = jnp.full(keep.shape[:2], self.rows, jnp.int32)
        pages = jax.tree.map(lambda a, b: compact(a, old.table, limit, keep, new.table, b, staged.table), state.pages, stage.pages)
        n = jnp.broadcast_to(jnp.minimum(end, self.sinks + self.recent)[:, None], keep.shape[:2])
        return State(pages, {"n": state.rows["n"].at[new.slot].set(n, mode="drop")})
