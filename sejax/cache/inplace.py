"""A layout for rules that must see a prompt's last layer before any layer is sealed: prefill fills the decode state itself.

A run has room for everything until it is sealed; pages are granted as it fills, and what a first prompt's seal leaves empty is
given back. The seal is a trim at the prompt's end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from sejax.cache.compose import Layer, owned
from sejax.cache.retention import Retention
from sejax.cache.ring import of_slot
from sejax.types import Array, LayerMethod, Rows, State


@dataclasses.dataclass(frozen=True)
class InPlace(Layer):
    """Layer's leaves. The retention's score takes what the method's `joint` gives, if it has one, as a second argument."""

    def evicting(self, retention: Retention) -> LayerMethod:
        base = super().evicting(retention)

        def told(joint: tuple[Any, ...]) -> Retention:
            return retention._replace(score=lambda candidates: retention.score(candidates, *joint))

        def seal(state: State, rows: Rows, *joint: Any) -> State:
            """A first prompt is cut to the budget, a later one leaves what fits before the next trim."""
            new, own, length = rows.count > 0, owned(state, rows), rows.start + rows.count
            limit = self.limit(retention, own, length)
            over = own["n"] >= jnp.where(rows.start[:, None] == 0, retention.quota(own["n"], length) + 1, limit)
            if self.window:  # it starts anew with each prompt
                at = jnp.where(new, rows.slot, state.rows["n"].shape[0])
                queries = state.rows["queries"].at[at].set(jnp.minimum(rows.count, self.window), mode="drop")
                state = State(state.pages, state.rows | {"queries": queries})
            return self.trim(told(joint), state, rows, new & jnp.any(over, axis=-1))

        def trim(state: State, rows: Rows, *joint: Any) -> State:
            assert base.due
            return self.trim(told(joint), state, rows, base.due(state, rows))

        def used(state: State, rows: Rows) -> Array:
            return -(-jnp.max(of_slot(state.rows["n"], rows), axis=-1) // self.storage.page)

        whole = lambda max_len: max_len  # noqa: E731
        prefill, decode = base.prefill._replace(init=self.init), base.decode._replace(after_step=trim if base.due else None)
        return base._replace(prefill=prefill, decode=decode, run=whole, stage_run=whole, history=None, seal=seal, used=used)
