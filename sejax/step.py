"""One decode step and one prefill chunk as pure functions: the order in which a layer's hooks run, written once.

Both the functional API and the engine's programs are made of these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sejax.kernels.attention import attention
from sejax.models import decoder
from sejax.models.config import Config
from sejax.types import Array, Hooks, LayerMethod, LayerSpec, Method, Qkv, Rows, State


def layers_of(config: Config, dtype: Any, method: Method, max_len: int) -> tuple[tuple[LayerSpec, LayerMethod], ...]:
    """Each layer with its method's record, for sequences of up to max_len tokens."""
    return tuple((spec, method.layer(spec, None)) for spec in decoder.specs(config, dtype, max_len))


def run_layer(
    params: dict[str, Array],
    config: Config,
    spec: LayerSpec,
    hooks: Hooks,
    state: State,
    x: Array,
    carry: Any,
    rows: Rows,
    history: Any = None,
) -> tuple[Array, State, Any]:
    """One layer: x [R,T,E] -> (x, state, carry). history(qkv) -> views of earlier turns' tokens, read beside the state's."""
    positions = rows.start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)

    def attend(qkv: Qkv) -> tuple[Array, tuple[State, Any]]:
        written = hooks.write(state, qkv, rows)
        views, passed = hooks.before_attention(written, qkv, carry, rows)
        older = history(qkv) if history else ()
        views = (*older, *views)
        seen = hooks.attend(qkv.q, views, rows) if hooks.attend else attention(qkv.q, views, rows.count)
        return seen.out, hooks.after_attention(written, qkv, seen, passed, rows)

    x, (state, carry) = decoder.layer(params, config, spec, x, positions, attend)
    state, x, carry = hooks.after_layer(state, x, carry, rows)
    return x, state, carry


def rows_of(table: Array, slot: Array, start: Array, count: Array, tokens: Array, pages: int) -> Rows:
    """Rows for slots i32[R] of a table i32[S,M]; a slot out of range becomes a padding row with page ids `pages`."""
    return Rows(slot, start, count, table.at[slot].get(mode="fill", fill_value=pages), tokens)


def pool_pages(state: State) -> int:
    """N, pages in a layer's pool."""
    return jax.tree.leaves(state.pages)[0].shape[0]


def decode(
    params: dict[str, Any],
    config: Config,
    layers: tuple[tuple[LayerSpec, LayerMethod], ...],
    states: tuple[State, ...],
    tables: tuple[Array, ...],
    slot: Array,
    start: Array,
    count: Array,
    tokens: Array,
) -> tuple[Array, tuple[State, ...]]:
    """One token for each row: slot, start, count (0 or 1), tokens i32[R]; tables: i32[S,M] a layer -> (f32[R,V], states)."""
    x = decoder.embed(params, config, tokens[:, None])
    carry, after = None, []
    for weights, (spec, method), state, table in zip(params["layers"], layers, states, tables, strict=True):
        rows = rows_of(table, slot, start, count, tokens[:, None], pool_pages(state))
        x, state, carry = run_layer(weights, config, spec, method.decode, state, x, carry, rows)
        after.append(state)
    return decoder.head(params, config, x[:, 0]), tuple(after)


def due(
    layers: tuple[tuple[LayerSpec, LayerMethod], ...], states: tuple[State, ...], tables: tuple[Array, ...], rows: Rows
) -> Array | None:
    """bool[R]: rows that must be trimmed before they take another token; None where no layer ever trims."""
    flags = [
        method.due(state, rows._replace(table=table.at[rows.slot].get(mode="fill", fill_value=pool_pages(state))))
        for (_, method), state, table in zip(layers, states, tables, strict=True)
        if method.due
    ]
    return jnp.any(jnp.stack(flags), axis=0) if flags else None


def joined(method: Method, states: tuple[State, ...], tables: tuple[Array, ...], rows: Rows) -> tuple[Any, ...]:
    """What seals and trims take beside (state, rows): nothing, or the method's joint of all layers. tables: i32[S,M] a layer."""
    if method.joint is None:
        return ()
    each = (rows_of(t, rows.slot, rows.start, rows.count, rows.tokens, pool_pages(s)) for s, t in zip(states, tables, strict=True))
    return (method.joint(states, tuple(each)),)


def trim(
    method: Method, layers: tuple[tuple[LayerSpec, LayerMethod], ...], states: tuple[State, ...], tables: tuple[Array, ...], rows: Rows
) -> tuple[State, ...]:
    """decode.after_step of every layer, chained by data so that their temporaries do not add up."""
    after, slot = [], rows.slot
    joint = joined(method, states, tables, rows)
    for (_, layer), state, table in zip(layers, states, tables, strict=True):
        if layer.decode.after_step:
            entry = table.at[slot].get(mode="fill", fill_value=pool_pages(state))
            state = layer.decode.after_step(state, rows._replace(slot=slot, table=entry), *joint)
            slot, _ = jax.lax.optimization_barrier((slot, state.rows))
        after.append(state)
    return tuple(after)
