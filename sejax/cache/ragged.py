"""A layout for heads that keep different numbers of rows: the run's head pages are dealt anew at every decision.

A run of M pages is M * H head pages, numbered j: page j // H, head slice j % H, whatever head of the model it then serves. Head h
owns `dealt[h]` of them in a row, behind those of the heads before it; a session that never decided has equal shares.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from sejax.cache.compose import Layer
from sejax.cache.retention import Retention, best
from sejax.types import HOLE, Array, Rows, State


@dataclasses.dataclass(frozen=True)
class Ragged(Layer):
    """Row leaves beside Layer's: "dealt" i32[S,H] head pages of each head, 0 for equal shares; "kept" i32[S,H] rows at the last
    decision. All heads of a layer decide together, when one of them has no room left."""

    def init(self, slots: int, pages: int, stage: bool = False) -> State:
        state = super().init(slots, pages, stage)
        if stage:
            return state
        zeros = {name: jnp.zeros((slots, self.spec.heads), jnp.int32) for name in ("dealt", "kept")}
        return State(state.pages, state.rows | zeros)

    def run(self, retention: Retention) -> int:
        """Pages for every head's share, its window and its slack, each begun page counted; then two a head for rounding."""
        assert retention.shares
        page, heads = self.storage.page, self.spec.heads
        past = retention.shares.mean - self.window
        each = -(-(self.window + retention.slack) // page) + 2
        return -(-(-(-heads * past // page) + heads * each) // heads) * page

    def placed(self, own: dict[str, Any], rows: Rows) -> Rows:
        """The table by head: i32[R,H,M'] head pages (page * H + slice), out of range behind what a head owns."""
        if "dealt" not in own:  # a stage
            return rows
        assert self.retention
        pages, heads = rows.table.shape[1], self.spec.heads
        shares = jnp.where(own["dealt"] > 0, own["dealt"], pages)
        first = jnp.cumsum(shares, axis=1) - shares
        width = max(pages, -(-(self.retention.budget + self.retention.slack) // self.storage.page))
        m = jnp.arange(width, dtype=jnp.int32)
        at = first[..., None] + m
        inside = (m < shares[..., None]) & (at < pages * heads)
        at = jnp.where(inside, at, 0)
        page = jnp.take_along_axis(rows.table[:, None, :], at // heads, axis=2)
        return rows._replace(table=jnp.where(inside, page * heads + at % heads, HOLE))

    def mean(self, retention: Retention, length: Array) -> Array | int:
        """Rows a head keeps in the mean at a logical length: i32[R] -> i32[R,1]."""
        assert retention.shares
        return retention.budget_at(length)[:, None] if retention.budget_at else retention.shares.mean

    def limit(self, retention: Retention, own: dict[str, Any], length: Array) -> Array:
        return jnp.where(own["dealt"] > 0, own["kept"], self.mean(retention, length)) + retention.slack

    def must(self, retention: Retention, own: dict[str, Any], total: Array, length: Array) -> Array:
        over = total >= jnp.where(own["n"] == 0, self.mean(retention, length) + 1, self.limit(retention, own, length))
        return jnp.broadcast_to(jnp.any(over, axis=1, keepdims=True), total.shape)

    def decide(self, retention: Retention, scores: Array, total: Array, window: Array, length: Array, room: int) -> tuple[Array, Array]:
        assert retention.shares
        quota = retention.shares.of(scores, total, window, length)
        return best(scores, total, quota, retention.budget, room), quota

    def dealt(self, retention: Retention, own: dict[str, Any], quota: Array, changed: Array) -> dict[str, Any]:
        pages = -(-(quota + retention.slack) // self.storage.page)
        return {"dealt": jnp.where(changed, pages, own["dealt"]), "kept": jnp.where(changed, quota, own["kept"])}
