"""Gold answers under many methods from one dense pass over their context: layer by layer, as the engine's prefill units run.

A prompt's own attention is dense under every method that runs here, so the methods differ only in what each layer then keeps and
reads. In one layer a method's own hooks store and seal the context, then take the known next tokens one at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sejax
from sejax.kernels.attention import attention
from sejax.models import decoder
from sejax.serve.plan import Watched
from sejax.types import Array, LayerMethod, LayerSpec, Method, Qkv, Rows, State

NEW = 48  # tokens after the context; fewer are padded


class Answer(NamedTuple):
    """logp f32[t], best i32[t]: of every token of the tail, seen from the token before it (the first one: 0, -1).

    kept: [layer][kv head] -> ascending positions held after the context.
    """

    logp: np.ndarray
    best: np.ndarray
    kept: list[list[np.ndarray]]


def answers(model: sejax.Model, methods: Sequence[Method], context: Sequence[int], tail: Sequence[int]) -> list[Answer]:
    """One Answer for each method, of `tail` (at most NEW tokens) after `context`."""
    if not 1 < len(tail) <= NEW:
        raise ValueError(f"the tail has {len(tail)} tokens; give between 2 and {NEW}")
    padded = jnp.asarray([*tail, *[0] * (NEW - len(tail))], jnp.int32)[None]
    x = decoder.embed(model.params, model.config, jnp.asarray(context, jnp.int32)[None])
    new = [decoder.embed(model.params, model.config, padded)] * len(methods)
    carries: list[Any] = [(None, None)] * len(methods)
    kept: list[list[list[np.ndarray]]] = [[] for _ in methods]
    table = [layers(model.config, str(model.dtype), method) for method in methods]
    spec = table[0][0][0]
    for index, weights in enumerate(model.params["layers"]):
        x, qkv = _dense(weights, model.config, spec, x)
        for m, rows in enumerate(table):
            static = rows[index]
            new[m], carries[m], held = _one(weights, model.config, *static, len(context), qkv, new[m], carries[m])
            kept[m].append([np.sort(head[head >= 0]) for head in np.asarray(held)])
    found = []
    for m in range(len(methods)):
        logp, best = (np.asarray(a)[: len(tail) - 1] for a in _judge(model.params, model.config, new[m], padded))
        found.append(Answer(np.append(np.float32(0), logp), np.append(-1, best), kept[m]))
    return found


@functools.cache
def layers(config: Any, dtype: str, method: Method) -> list[tuple[LayerSpec, LayerMethod, bool]]:
    """(spec, record, staged) of each layer; layers whose record never asked for the index share one, so that they share programs."""
    shared: dict[Any, tuple[LayerSpec, LayerMethod, bool]] = {}
    found = []
    for spec in decoder.specs(config, dtype):
        watched = Watched(**vars(spec))
        entry = (watched, method.layer(watched, None), method.order == "layer")
        jax.eval_shape(functools.partial(_held_anew, *entry[:2]))  # a rule may ask only when it is traced
        found.append(shared.setdefault(watched.kind_of or ("layer", spec.index), entry))
    return found


def _held_anew(spec: LayerSpec, method: LayerMethod) -> State:
    return method.decode.init(1, method.pages(method.run(1)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dense(weights: Any, config: Any, spec: LayerSpec, x: Array) -> tuple[Array, Qkv]:
    """A layer over the whole context: [1,T,E] -> ([1,T,E], its projections)."""
    full = sejax.methods.full().layer(spec, None)
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]

    def attend(qkv: Qkv) -> tuple[Array, Qkv]:
        state, rows = _empty(full, x.shape[1], 0, x.shape[1])
        state = full.prefill.write(state, qkv, rows)
        views, _ = full.prefill.before_attention(state, qkv, None, rows)
        return attention(qkv.q, views, rows.count).out, qkv

    return decoder.layer(weights, config, spec, x, positions, attend)


def _empty(method: LayerMethod, room: int, start: int, count: int) -> tuple[State, Rows]:
    """A pool for one sequence in slot 0 with `room` token rows, and Rows that name it."""
    pages = method.pages(room)
    one = jnp.ones(1, jnp.int32)
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    return method.decode.init(1, pages), Rows(one * 0, one * start, one * count, table, jnp.zeros((1, max(count, 1)), jnp.int32))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _one(
    weights: Any, config: Any, spec: LayerSpec, method: LayerMethod, staged: bool, length: int, qkv: Qkv, new: Array, carry: Any
) -> tuple[Array, Any, Array]:
    """One layer of one method: the context sealed, then the new tokens [1,NEW,E] -> (new, carry, positions held [H,C])."""
    state, rows = _empty(method, method.run(length + NEW), 0, length)
    state = lax.optimization_barrier(state)  # an empty history is not to be folded into constants
    state, prompt_carry = _sealed(method, staged, state, rows, qkv, carry[0])
    held = method.held(state, rows)[0]

    def token(state: State, xs: Any) -> tuple[State, Any]:
        at, one, passed = xs
        now = rows._replace(start=at[None], count=jnp.ones(1, jnp.int32), tokens=jnp.zeros((1, 1), jnp.int32))
        state = method.decode.write(state, one, now)
        views, passed = method.decode.before_attention(state, one, passed, now)
        seen = attention(one.q, views, now.count)
        state, passed = method.decode.after_attention(state, one, seen, passed, now)
        if method.decode.after_step:
            state = method.decode.after_step(state, now)
        return state, (seen.out[0], passed)

    positions = length + jnp.arange(NEW, dtype=jnp.int32)

    def attend(qkv: Qkv) -> tuple[Array, Any]:
        each = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0)[:, None], qkv)
        _, (out, passed) = lax.scan(token, state, (positions, each, carry[1]))
        return jnp.moveaxis(out, 0, 1), passed

    new, passed = decoder.layer(weights, config, spec, new, positions[None], attend)
    return new, (prompt_carry, passed), held


def _sealed(method: LayerMethod, staged: bool, state: State, rows: Rows, qkv: Qkv, carry: Any) -> tuple[State, Any]:
    """What a layer holds after its first turn, as the prefill programs make it; attention runs only for what it tells the hooks."""
    stage, at = state, rows
    if staged:
        pages = method.pages(method.stage_run(qkv.k.shape[1]))
        at = rows._replace(table=jnp.arange(pages, dtype=jnp.int32)[None])
        stage = method.prefill.init(1, pages)
    stage = method.prefill.write(stage, qkv, at)
    views, carry = method.prefill.before_attention(stage, qkv, carry, at)
    if method.history and staged:
        views = (*method.history(state, qkv, rows), *views)
    stage, carry = method.prefill.after_attention(stage, qkv, attention(qkv.q, views, at.count), carry, at)
    if staged:
        assert method.seal
        return method.seal(stage, state, at, rows, rows), carry
    return method.seal(stage, rows) if method.seal else stage, carry


@functools.partial(jax.jit, static_argnums=1)
def _judge(params: Any, config: Any, x: Array, tail: Array) -> tuple[Array, Array]:
    """Log-probability of each next token of the tail, and the most likely one: f32[NEW-1], i32[NEW-1]."""
    logits = decoder.head(params, config, x[0, :-1])
    logp = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logp, tail[0, 1:, None], axis=-1)[:, 0], jnp.argmax(logits, axis=-1)
