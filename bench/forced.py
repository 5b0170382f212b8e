"""Gold answers under many methods from one dense pass over their context: layer by layer, as the engine's prefill units run.

A prompt's own attention is dense under most methods, so these differ only in what each layer then keeps and reads; a method that
reads a prompt in its own way gets a pass of its own. In one layer a method's own hooks store and seal the context, then take the
known next tokens one at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sejax
from sejax import step
from sejax.kernels.attention import attention
from sejax.models import decoder
from sejax.types import Array, AttentionView, Hooks, LayerMethod, LayerSpec, Method, Qkv, Rows, Seen, State

NEW = 32  # tokens after the context; fewer are padded
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiling takes most of the time here


class Answer(NamedTuple):
    """logp f32[t], best i32[t]: of every token of the tail, seen from the token before it (the first one: 0, -1).

    kept: [layer][kv head] -> ascending positions held after the context.
    """

    logp: np.ndarray
    best: np.ndarray
    kept: list[list[np.ndarray]]


def answers(
    model: sejax.Model, methods: Sequence[Method], context: Sequence[int], tail: Sequence[int], dense: Iterable[tuple[Qkv, Array]] = ()
) -> list[Answer]:
    """One Answer for each method, of `tail` (at most NEW tokens) after `context`. dense: list(passed(model, context)), if at hand."""
    if not 1 < len(tail) <= NEW:
        raise ValueError(f"the tail has {len(tail)} tokens; give between 2 and {NEW}")
    runs = [Run(model, method.fitted(model), len(context), tail) for method in methods]
    together = [run for run in runs if not run.reads]
    passes = [(dense or passed(model, context), together)] if together else []
    for layers_, of in [*passes, *((passed(model, context, run.method), [run]) for run in runs if run.reads)]:
        for index, (qkv, hidden) in enumerate(layers_):
            for run in of:
                run.layer(index, qkv, hidden)
    return [run.answer(jnp.asarray(context, jnp.int32)) for run in runs]


def passed(model: sejax.Model, context: Sequence[int], method: Method | None = None) -> Iterator[tuple[Qkv, Array]]:
    """Layer by layer a context's projections and the layer's output [1,T,E]; its attention as `method` reads a prompt (None: dense)."""
    x = decoder.embed(model.params, model.config, jnp.asarray(context, jnp.int32)[None])
    found = layers(method or sejax.methods.full(), decoder.specs(model.config, str(model.dtype)))
    for weights, (spec, record) in zip(model.params["layers"], found, strict=True):
        x, qkv = _passed(weights, model.config, spec, record, x)
        yield qkv, x


def clear() -> None:
    """Let go of all compiled programs: a process can map only so much code."""
    layers.cache_clear()
    SEALS.clear()
    jax.clear_caches()


class Run:
    """One method on its way through the layers: `layer` in order, then `answer`."""

    def __init__(self, model: sejax.Model, method: Method, length: int, tail: Sequence[int]) -> None:
        self.model, self.method, self.length, self.count = model, method, length, len(tail)
        self.specs = decoder.specs(model.config, str(model.dtype), length + NEW)
        self.layers = layers(method, self.specs)
        self.reads = any(record.prefill.attend for _, record in self.layers)
        self.tail = jnp.asarray([*tail, *[0] * (NEW - len(tail))], jnp.int32)[None]
        self.x = decoder.embed(model.params, model.config, self.tail)
        self.stored: list[State] = []
        self.prompt_carry = self.carry = None
        self.kept: list[list[np.ndarray]] = []

    def layer(self, index: int, qkv: Qkv, hidden: Array) -> None:
        """qkv, hidden: the context's projections in this layer, and its output."""
        late = bool(self.method.joint or self.method.passes)  # not sealed before all layers have seen the context
        static = (*self.layers[index], self.method.order == "layer", late, self.length)
        state, self.prompt_carry = _stored(*static, qkv, hidden, self.prompt_carry)
        if late:
            self.stored.append(state)
        else:
            self.take(index, state)

    def take(self, index: int, state: State) -> None:
        """The tail through one layer whose context is sealed."""
        static = (self.model.config, *self.layers[index], self.length)
        self.x, self.carry, held = _taken(self.model.params["layers"][index], *static, state, self.x, self.carry)
        self.kept.append([np.sort(head[head >= 0]) for head in np.asarray(held)])

    def answer(self, context: Array) -> Answer:
        model, states = self.model, tuple(self.stored)
        if states and self.method.passes:
            for i in range(int(self.method.passes.number(np.asarray(context), self.length))):
                states = self.again(states, *self.method.passes.input(i, context, self.length))
        if states:
            rows = [_rows(record, self.length, 0, self.length) for _, record in self.layers]
            joint = step.joined(self.method, states, tuple(r.table for r in rows), rows[0])
            for index, (record, state) in enumerate(zip(seals(self, states, joint), states, strict=True)):
                self.take(index, _late(record, self.length, state, joint))
        logp, best = (np.asarray(a)[: self.count - 1] for a in _judge(model.params, model.config, self.x, self.tail))
        return Answer(np.append(np.float32(0), logp), np.append(-1, best), self.kept)

    def again(self, states: tuple[State, ...], ids: Array, new: Array, carry: Any) -> tuple[State, ...]:
        """One of the method's passes over its context."""
        x, after = decoder.embed(self.model.params, self.model.config, ids[None]), []
        for weights, (spec, record), state in zip(self.model.params["layers"], self.layers, states, strict=True):
            x, state, carry = _replayed(weights, self.model.config, spec, record, self.length, jnp.reshape(new, 1), state, x, carry)
            after.append(state)
        return tuple(after)


@functools.cache
def layers(method: Method, specs: tuple[LayerSpec, ...]) -> list[tuple[LayerSpec, LayerMethod]]:
    """Each layer's record; records of the same code over the same values are one, so that they share programs."""
    shared: dict[Any, tuple[LayerSpec, LayerMethod]] = {}
    found = []
    for spec in specs:
        entry = (spec, method.layer(spec, None))
        found.append(shared.setdefault(made_of(entry[1]), entry))
    return found


SEALS: dict[tuple[Method, int], list[LayerMethod]] = {}


def seals(run: Run, states: tuple[State, ...], joint: tuple[Any, ...]) -> list[LayerMethod]:
    """Each layer's record for its seal, which may use the layer's number: two layers whose programs are equal speak for their group."""
    key = (run.method, run.length)
    if key not in SEALS:
        own, groups = [run.method.layer(spec, None) for spec in run.specs], {}
        for index, (_, record) in enumerate(run.layers):
            groups.setdefault(id(record), []).append(index)
        for first, *others in groups.values():
            texts = {_late.lower(own[i], run.length, states[i], joint).as_text() for i in (first, *others[:1])}
            for i in others if len(texts) == 1 else ():
                own[i] = own[first]
        SEALS[key] = own
    return SEALS[key]


def made_of(x: Any, above: tuple[int, ...] = ()) -> Any:
    """A hashable description of functions by their code and what they close over; a layer's index in its spec does not count."""
    if id(x) in above:
        return len(above) - above.index(id(x))
    inside = lambda values: tuple(made_of(value, (*above, id(x))) for value in values)  # noqa: E731
    if isinstance(x, LayerSpec):
        return inside(getattr(x, f.name) for f in dataclasses.fields(x) if f.name != "index")
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x), inside(getattr(x, f.name) for f in dataclasses.fields(x))
    if inspect.ismethod(x):
        return x.__func__.__code__, inside([x.__self__])
    if isinstance(x, functools.partial):
        return inside([x.func, x.args, x.keywords])
    if inspect.isfunction(x):
        return x.__code__, inside([c.cell_contents for c in x.__closure__ or ()]), inside(x.__defaults__ or ())
    if isinstance(x, dict):
        return inside(x.items())
    if isinstance(x, np.ndarray):
        return x.shape, str(x.dtype), x.tobytes()
    return (type(x), inside(x)) if isinstance(x, (tuple, list)) else x if isinstance(x, Hashable) else id(x)


def _rows(method: LayerMethod, length: int, start: int, count: int) -> Rows:
    """The one sequence, of `length` tokens before its tail, in slot 0 of a pool of its own."""
    pages, one = method.pages(method.run(length + NEW)), jnp.ones(1, jnp.int32)
    table, turn = jnp.arange(pages, dtype=jnp.int32)[None], jnp.asarray([[start, start + count]], jnp.int32)
    return Rows(one * 0, one * start, one * count, table, jnp.zeros((1, max(count, 1)), jnp.int32), turn)


def _attended(hooks: Hooks, q: Array, views: tuple[AttentionView, ...], rows: Rows) -> Seen:
    return hooks.attend(q, views, rows) if hooks.attend else attention(q, views, rows.count)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), compiler_options=QUICK)
def _passed(weights: Any, config: Any, spec: LayerSpec, method: LayerMethod, x: Array) -> tuple[Array, Qkv]:
    """A layer over the whole context: [1,T,E] -> ([1,T,E], its projections)."""
    full = sejax.methods.full(page=method.page).layer(spec, None)
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]

    def attend(qkv: Qkv) -> tuple[Array, Qkv]:
        rows = _rows(full, x.shape[1], 0, x.shape[1])
        state = full.prefill.write(full.decode.init(1, rows.table.shape[1]), qkv, rows)
        views, _ = full.prefill.before_attention(state, qkv, None, rows)
        return _attended(method.prefill, qkv.q, views, rows).out, qkv

    return decoder.layer(weights, config, spec, x, positions, attend)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), compiler_options=QUICK)
def _stored(
    spec: LayerSpec, method: LayerMethod, staged: bool, late: bool, length: int, qkv: Qkv, hidden: Array, carry: Any
) -> tuple[State, Any]:
    """What a layer holds after its first turn, as the prefill programs make it: sealed, unless that comes late.

    Attention runs again only for what it tells the hooks.
    """
    rows = _rows(method, length, 0, length)
    # An empty pool is data: as a constant it would be folded through everything that reads it.
    state = lax.optimization_barrier(method.decode.init(1, rows.table.shape[1]))
    stage, at = state, rows
    if staged:
        pages = method.pages(method.stage_run(length))
        at = rows._replace(table=jnp.arange(pages, dtype=jnp.int32)[None])
        stage = method.prefill.init(1, pages)
    stage = method.prefill.write(stage, qkv, at)
    views, carry = method.prefill.before_attention(stage, qkv, carry, at)
    if method.history and staged:
        views = (*method.history(state, qkv, rows), *views)
    stage, carry = method.prefill.after_attention(stage, qkv, _attended(method.prefill, qkv.q, views, at), carry, at)
    stage, _, carry = method.prefill.after_layer(stage, hidden, carry, at)
    if staged:
        assert method.seal
        return method.seal(stage, state, at, rows, rows), carry
    return method.seal(stage, rows) if method.seal and not late else stage, carry


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _late(method: LayerMethod, length: int, state: State, joint: tuple[Any, ...]) -> State:
    return method.seal(state, _rows(method, length, 0, length), *joint) if method.seal else state


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), compiler_options=QUICK)
def _taken(
    weights: Any,
    config: Any,
    spec: LayerSpec,
    method: LayerMethod,
    length: int,
    state: State,
    new: Array,
    carry: Any,
) -> tuple[Array, Any, Array]:
    """The tail [1,NEW,E] through one layer, token by token where it attends -> (its output, carry, positions held before, [H,C])."""
    rows = _rows(method, length, 0, length)
    held = method.held(state, rows)[0]

    def token(state: State, xs: Any) -> tuple[State, Any]:
        at, one, passed = xs
        now = Rows(rows.slot, at[None], jnp.ones(1, jnp.int32), rows.table, jnp.zeros((1, 1), jnp.int32))
        state = method.decode.write(state, one, now)
        views, passed = method.decode.before_attention(state, one, passed, now)
        seen = _attended(method.decode, one.q, views, now)
        state, passed = method.decode.after_attention(state, one, seen, passed, now)
        return state, (seen.out[0], passed)

    positions = length + jnp.arange(NEW, dtype=jnp.int32)

    def attend(qkv: Qkv) -> tuple[Array, Any]:
        each = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0)[:, None], qkv)
        _, (out, passed) = lax.scan(token, state, (positions, each, carry))
        return jnp.moveaxis(out, 0, 1), passed

    new, passed = decoder.layer(weights, config, spec, new, positions[None], attend)
    return new, passed, held


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), compiler_options=QUICK)
def _replayed(
    weights: Any, config: Any, spec: LayerSpec, method: LayerMethod, length: int, new: Array, state: State, x: Array, carry: Any
) -> tuple[Array, State, Any]:
    assert method.replay
    rows = _rows(method, length, length, 0)._replace(count=new, tokens=jnp.zeros(x.shape[:2], jnp.int32))
    return step.run_layer(weights, config, spec, method.replay, state, x, carry, rows)


@functools.partial(jax.jit, static_argnums=1)
def _judge(params: Any, config: Any, x: Array, tail: Array) -> tuple[Array, Array]:
    """Log-probability of each next token of the tail, and the most likely one: f32[NEW-1], i32[NEW-1]."""
    logits = decoder.head(params, config, x[0, :-1])
    logp = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logp, tail[0, 1:, None], axis=-1)[:, 0], jnp.argmax(logits, axis=-1)
