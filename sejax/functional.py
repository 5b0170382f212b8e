"""The functional API: a cache of sessions as an immutable pytree, and pure functions over it.

Every function may be called as it is, or inside the caller's own jit with slot, length and tokens traced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from sejax import step
from sejax.models import Config, Model, decoder
from sejax.models.model import causal
from sejax.types import Array, LayerMethod, LayerSpec, Method, Qkv, Rows, State


class Cache(struct.PyTreeNode):
    """Sessions in slots. states: one a layer; tables: i32[S,M] for each distinct M; length i32[S] logical tokens.

    method, config, max_len, slots, dtype are static. A cache is a value: functions return a new one.
    """

    states: tuple[State, ...]
    tables: tuple[Array, ...]
    length: Array
    method: Method = struct.field(pytree_node=False)
    config: Config = struct.field(pytree_node=False)
    max_len: int = struct.field(pytree_node=False)
    slots: int = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)

    @property
    def layers(self) -> tuple[tuple[LayerSpec, LayerMethod], ...]:
        return step.layers_of(self.config, self.dtype, self.method, self.max_len)

    @property
    def layer_tables(self) -> tuple[Array, ...]:
        """The table of each layer: layers with runs of equal length share one."""
        by_width = {table.shape[1]: table for table in self.tables}
        return tuple(by_width[method.pages(method.run(self.max_len))] for _, method in self.layers)


class Session(struct.PyTreeNode):
    """What one slot holds: a pytree that `put` accepts into any slot of a cache with the same method, model and max_len."""

    pages: tuple[Any, ...]  # one a layer: leaves [M,...]
    rows: tuple[Any, ...]  # one a layer: leaves [...]
    length: Array  # i32 logical tokens
    method: Method = struct.field(pytree_node=False)
    config: Config = struct.field(pytree_node=False)


def init(model: Model, method: Method, slots: int, max_len: int) -> Cache:
    """An empty cache of `slots` sessions of up to max_len logical tokens each. All memory is allocated here.

    Raises ValueError if slots or max_len is not positive, or the method refuses a layer.
    """
    if slots < 1 or max_len < 1:
        raise ValueError(f"slots={slots} and max_len={max_len} must both be at least 1")
    dtype, method = str(model.dtype), method.fitted(model)
    layers = step.layers_of(model.config, dtype, method, max_len)
    widths = [m.pages(m.run(max_len)) for _, m in layers]
    states = tuple(m.decode.init(slots, slots * width) for (_, m), width in zip(layers, widths, strict=True))
    tables = tuple(jnp.arange(slots * w, dtype=jnp.int32).reshape(slots, w) for w in sorted(set(widths)))
    return Cache(states, tables, jnp.zeros(slots, jnp.int32), method, model.config, max_len, slots, dtype)


def _check(model: Model, method: Method, cache: Cache) -> None:
    if cache.method not in (method, method.fitted(model)) or cache.config != model.config:
        raise ValueError(f"the cache was made for {cache.method}, not for {method} with this model; make one with sejax.init")


def _slot(cache: Cache, slot: Any) -> Array:
    """i32 slot number; a traced one out of range becomes S, which nothing is stored into."""
    if isinstance(slot, (int, np.integer)) and not 0 <= slot < cache.slots:
        raise ValueError(f"slot={slot} is not one of the cache's slots 0..{cache.slots - 1}")
    slot = jnp.asarray(slot, jnp.int32)
    return jnp.where((slot >= 0) & (slot < cache.slots), slot, cache.slots)


@functools.partial(jax.jit, static_argnames=("method", "chunk"))
def _prefill(model: Model, method: Method, cache: Cache, tokens: Array, slot: Array, length: Array, chunk: int) -> tuple[Array, Cache]:
    start = cache.length[slot]
    fits = (start + length <= cache.max_len) & (slot < cache.slots)
    count = jnp.where(fits, length, 0)
    chunks = -(-tokens.shape[0] // chunk)
    padded = jnp.pad(tokens.astype(jnp.int32), (0, chunks * chunk - tokens.shape[0])).reshape(chunks, 1, chunk)
    offset = jnp.arange(chunks, dtype=jnp.int32) * chunk
    counts = jnp.clip(count - offset, 0, chunk)
    x = decoder.embed(model.params, model.config, padded)
    run = _layer_major if method.order == "layer" else _chunk_major
    x, states = run(model, cache, slot, start, count, padded, start + offset, counts, x)
    last = jnp.maximum(count - 1, 0)
    hidden = x.reshape(chunks * chunk, -1)[last]
    logits = decoder.head(model.params, model.config, hidden)
    logits = jnp.where(fits & (length > 0), logits, jnp.nan)
    return logits, cache.replace(states=states, length=cache.length.at[slot].add(count, mode="drop"))


def prefill(
    model: Model, method: Method, cache: Cache, tokens: Array, slot: Any = 0, length: Any = None, chunk: int = 512
) -> tuple[Array, Cache]:
    """One turn: append tokens i32[T] (the first `length`, default all) to a slot, then seal. -> (f32[V] of the last, cache).

    chunk: tokens a pass, static; it does not change the result of methods that do not compact between chunks. Past max_len
    the logits are NaN and nothing is stored.
    """
    _check(model, method, cache)
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 1 or tokens.shape[0] == 0:
        raise ValueError(f"tokens must be i32[T] with T >= 1, not of shape {tokens.shape}; pass one sequence at a time")
    length = tokens.shape[0] if length is None else length
    length = jnp.minimum(jnp.asarray(length, jnp.int32), tokens.shape[0])
    return _prefill(model, method, cache, tokens, _slot(cache, slot), length, min(chunk, tokens.shape[0]))


def _slot_rows(cache: Cache, layer: int, slot: Array, start: Array, count: Array, tokens: Array) -> Rows:
    pages = step.pool_pages(cache.states[layer])
    return step.rows_of(cache.layer_tables[layer], slot[None], start[None], count[None], tokens, pages)


def _scan(body: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
    """lax.scan; a single pass is run as it is."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return lax.scan(body, carry, xs)
    carry, y = body(carry, jax.tree.map(lambda leaf: leaf[0], xs))
    return carry, jax.tree.map(lambda leaf: leaf[None], y)


def _chunk_major(
    model: Model, cache: Cache, slot: Array, start: Array, count: Array, tokens: Array, starts: Array, counts: Array, x: Array
) -> tuple[Array, tuple[State, ...]]:
    """Each chunk through all layers, in place; then the method's passes, and the in-place seal."""
    turn = jnp.stack([start, start + count])[None]

    def body(states: tuple[State, ...], chunk: Any) -> tuple[tuple[State, ...], Array]:
        hidden, ids, begin, new = chunk
        carry, after = None, []
        for i, ((spec, method), state) in enumerate(zip(cache.layers, states, strict=True)):
            rows = _slot_rows(cache, i, slot, begin, new, ids)._replace(turn=turn)
            weights = model.params["layers"][i]
            hidden, state, carry = step.run_layer(weights, model.config, spec, method.prefill, state, hidden, carry, rows)
            after.append(state)
        return tuple(after), hidden

    states, x = _scan(body, cache.states, (x, tokens, starts, counts))
    states = _replayed(model, cache, slot, start, count, tokens.reshape(-1), states)
    sealed, one = [], Rows(slot[None], start[None], count[None], slot[None, None], tokens[0])
    joint = step.joined(cache.method, states, cache.layer_tables, one)
    for i, ((_, method), state) in enumerate(zip(cache.layers, states, strict=True)):
        rows = _slot_rows(cache, i, slot, start, count, tokens[0])
        sealed.append(method.seal(state, rows, *joint) if method.seal else state)
    return x, tuple(sealed)


def _replayed(
    model: Model, cache: Cache, slot: Array, start: Array, count: Array, tokens: Array, states: tuple[State, ...]
) -> tuple[State, ...]:
    """The method's passes over a first prompt, tokens i32[T]; other turns have none."""
    passes = cache.method.passes
    if passes is None:
        return states

    def again(index: Array, states: tuple[State, ...]) -> tuple[State, ...]:
        ids, new, carry = passes.input(index, tokens, count)
        x, after = decoder.embed(model.params, model.config, ids[None]), []
        for i, ((spec, method), state) in enumerate(zip(cache.layers, states, strict=True)):
            assert method.replay
            rows = _slot_rows(cache, i, slot, count, new, ids[None])
            x, state, carry = step.run_layer(model.params["layers"][i], model.config, spec, method.replay, state, x, carry, rows)
            after.append(state)
        return tuple(after)

    return lax.fori_loop(0, jnp.where(start == 0, passes.number(tokens, count), 0), again, states)


def _layer_major(
    model: Model, cache: Cache, slot: Array, start: Array, count: Array, tokens: Array, starts: Array, counts: Array, x: Array
) -> tuple[Array, tuple[State, ...]]:
    """All chunks through one layer's stage, seal it, next layer: one layer's raw keys and values exist at a time."""
    carries, after, turn = None, [], jnp.stack([start, start + count])[None]
    for i, ((spec, method), state) in enumerate(zip(cache.layers, cache.states, strict=True)):
        width = method.pages(method.stage_run(tokens.shape[0] * tokens.shape[2]))
        assert method.history and method.seal, "order layer needs both"
        stage, history = method.prefill.init(1, width), method.history
        table = jnp.arange(width, dtype=jnp.int32)[None]

        def body(stage: State, chunk: Any, i=i, spec=spec, method=method, state=state, table=table, history=history) -> Any:
            hidden, carry, ids, begin, new = chunk
            old = _slot_rows(cache, i, slot, begin, new, ids)._replace(turn=turn)
            rows = old._replace(slot=jnp.zeros(1, jnp.int32), table=table)
            older = lambda qkv: history(state, qkv, old)  # noqa: E731
            weights = model.params["layers"][i]
            hidden, stage, carry = step.run_layer(weights, model.config, spec, method.prefill, stage, hidden, carry, rows, older)
            return stage, (hidden, carry)

        stage, (x, carries) = _scan(body, stage, (x, carries, tokens, starts, counts))
        new = _slot_rows(cache, i, slot, start, count, tokens[0])
        staged = new._replace(slot=jnp.zeros(1, jnp.int32), table=table)
        sealed = method.seal(stage, state, staged, new, new)
        x, sealed = lax.optimization_barrier((x, sealed))  # the next layer's stage comes after this one is gone
        after.append(sealed)
    return x, tuple(after)


@functools.partial(jax.jit, static_argnames=("method",))
def _decode(model: Model, method: Method, cache: Cache, tokens: Array, slots: Array) -> tuple[Array, Cache]:
    real = (slots >= 0) & (slots < cache.slots)
    slot = jnp.where(real, slots, cache.slots)
    start = cache.length.at[slot].get(mode="fill", fill_value=0)
    fits = start < cache.max_len
    count = (real & fits).astype(jnp.int32)
    logits, states = step.decode(model.params, model.config, cache.layers, cache.states, cache.layer_tables, slot, start, count, tokens)
    rows = Rows(slot, start, count, slot[:, None], tokens[:, None])
    flags = step.due(cache.layers, states, cache.layer_tables, rows)
    if flags is not None:
        states, logits = lax.optimization_barrier((states, logits))  # without it one layer's pool is copied every step
        flags = flags & (count > 0)
        states = lax.cond(jnp.any(flags), lambda s: step.trim(cache.method, cache.layers, s, cache.layer_tables, rows), lambda s: s, states)
    logits = jnp.where((fits | ~real)[:, None], logits, jnp.nan)
    return logits, cache.replace(states=states, length=cache.length.at[slot].add(count, mode="drop"))


def decode(model: Model, method: Method, cache: Cache, tokens: Array, slots: Array) -> tuple[Array, Cache]:
    """One token for each row: tokens i32[R], slots i32[R] (distinct; slot >= S is an idle row) -> (f32[R,V], cache).

    A row at max_len gets NaN logits and stores nothing.
    """
    _check(model, method, cache)
    tokens, slots = jnp.asarray(tokens, jnp.int32), jnp.asarray(slots, jnp.int32)
    if tokens.ndim != 1 or tokens.shape != slots.shape:
        raise ValueError(f"tokens {tokens.shape} and slots {slots.shape} must both be i32[R]: one token for each slot")
    return _decode(model, method, cache, tokens, slots)


@functools.partial(jax.jit, static_argnames=("config", "spec"))
def _traced(weights: Any, config: Config, spec: LayerSpec, x: Array) -> tuple[Array, Qkv]:
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return decoder.layer(weights, config, spec, x, positions, lambda qkv: (causal(qkv)[0], qkv))


def trace(model: Model, tokens: Array) -> Iterator[tuple[LayerSpec, Qkv]]:
    """Each layer's projections [B,T,...] in the dense pass over tokens i32[B,T], one layer after another: what calibration looks at."""
    x = decoder.embed(model.params, model.config, jnp.asarray(tokens))
    for weights, spec in zip(model.params["layers"], decoder.specs(model.config, model.dtype), strict=True):
        x, qkv = _traced(weights, model.config, dataclasses.replace(spec, index=0), x)  # one program for all layers
        yield spec, qkv


def take(cache: Cache, slot: Any) -> Session:
    """A copy of what a slot holds. slot: i32, may be traced."""
    slot = _slot(cache, slot)
    pages = tuple(
        jax.tree.map(lambda leaf, t=table: leaf[t[slot]], state.pages)
        for state, table in zip(cache.states, cache.layer_tables, strict=True)
    )
    rows = tuple(jax.tree.map(lambda leaf: leaf[slot], state.rows) for state in cache.states)
    return Session(pages, rows, cache.length[slot], cache.method, cache.config)


def put(cache: Cache, slot: Any, session: Session) -> Cache:
    """Fill a slot with a session; what was there is gone. Raises ValueError if it belongs to another method or model."""
    if session.method != cache.method or session.config != cache.config:
        raise ValueError(f"the session was made with {session.method}, the cache holds {cache.method}; use the same method and model")
    slot, states = _slot(cache, slot), []
    for i, (state, table) in enumerate(zip(cache.states, cache.layer_tables, strict=True)):
        ids = table.at[slot].get(mode="fill", fill_value=step.pool_pages(state))
        pages = jax.tree.map(lambda leaf, new, ids=ids: leaf.at[ids].set(new, mode="drop"), state.pages, session.pages[i])
        rows = jax.tree.map(lambda leaf, new: leaf.at[slot].set(new, mode="drop"), state.rows, session.rows[i])
        states.append(State(pages, rows))
    return cache.replace(states=tuple(states), length=cache.length.at[slot].set(session.length, mode="drop"))


def clear(cache: Cache, slot: Any) -> Cache:
    """A slot starts anew. Page leaves stay as they are: nothing reads a row that does not count."""
    slot = _slot(cache, slot)
    states = tuple(
        State(state.pages, jax.tree.map(lambda leaf: leaf.at[slot].set(jnp.zeros_like(leaf[0]), mode="drop"), state.rows))
        for state in cache.states
    )
    return cache.replace(states=states, length=cache.length.at[slot].set(0, mode="drop"))


def kept(cache: Cache, slot: Any) -> list[Array]:
    """Logical positions a slot still holds: one i32[H, capacity] a layer, ascending, -1 (at the end) where empty."""
    slot = _slot(cache, slot)
    one, zero = slot[None], jnp.zeros(1, jnp.int32)
    found = []
    for i, (_, method) in enumerate(cache.layers):
        rows = _slot_rows(cache, i, slot, cache.length[slot], zero[0], one[:, None])
        positions = method.held(cache.states[i], rows)[0]
        order = jnp.sort(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=-1)
        found.append(jnp.where(order == jnp.iinfo(jnp.int32).max, -1, order))
    return found
