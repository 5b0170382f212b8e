"""Every program the engine runs, compiled before the first request. With sejax/functional.py the only place of jax.jit.

Cache state is donated: a program takes the buffers and hands them back. A prefill unit's hidden state is not: the host waits
on it to bound how far it runs ahead. Layers whose lowered text is equal share a program; layers of equal specs whose method
never asked for their index need not even be lowered.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sejax import step
from sejax.kernels.launch import on_gpu
from sejax.models import decoder
from sejax.serve import live as live_rows
from sejax.serve.live import Live
from sejax.serve.plan import Job, Plan
from sejax.types import Array, Rows, State

Key = tuple[str, int, int]  # program, layer group, bucket


def decodes(burst: int) -> dict[str, tuple[bool, int]]:
    """Decode programs: name -> (whether they only take arg-maxes, steps). On a CPU one program branches on the device instead."""
    greedy = {"": False, "_greedy": True} if on_gpu() else {"": False}
    steps = {"decode": 1} | ({"burst": burst} if burst > 1 else {})
    return {name + ending: (only, count) for name, count in steps.items() for ending, only in greedy.items()}


def _decode(plan: Plan, layer_table: tuple[int, ...], greedy: bool, params: Any, states: Any, tables: Any, live: Live, slot: Array) -> Any:
    rows = live_rows.of_slots(live, slot)
    count = ((rows.left > 0) & ~rows.due).astype(jnp.int32)
    per_layer = tuple(tables[i] for i in layer_table)
    logits, states = step.decode(params, plan.model.config, plan.layers, states, per_layer, slot, rows.length, count, rows.last)
    token, after = live_rows.choose(logits, rows, count, greedy)
    after = after._replace(length=rows.length + count)
    flags = step.due(plan.layers, states, per_layer, Rows(slot, rows.length, count, slot[:, None], slot[:, None]))
    due = jnp.zeros_like(rows.due) if flags is None else flags & (slot < plan.sizes.slots)
    live = live_rows.store(live, slot, after._replace(due=due))
    return states, live, jnp.stack([jnp.where(count > 0, token, -1), due.astype(jnp.int32)])


def _steps(
    plan: Plan, layer_table: tuple[int, ...], greedy: bool, steps: int, params: Any, states: Any, tables: Any, live: Live, slot: Array
) -> Any:
    """Decode steps one behind the other: out i32[steps,2,R]. A row that is due, or has stopped, idles in those that are left."""

    def one(i: Array | int, carry: Any) -> Any:
        states, live, out = carry
        states, live, now = _decode(plan, layer_table, greedy, params, states, tables, live, slot)
        return states, live, out.at[i].set(now)

    carry = (states, live, jnp.zeros((steps, 2, len(slot)), jnp.int32))
    return one(0, carry) if steps == 1 else lax.fori_loop(0, steps, one, carry)


def _trim(plan: Plan, index: int, state: State, table: Array, live: Live, slot: Array, *joint: Any) -> State:
    """Make room in one layer of a slot that is due."""
    _, method = plan.layers[index]
    length = live.length.at[slot].get(mode="fill", fill_value=0)
    rows = step.rows_of(table, slot, length, jnp.zeros_like(slot), slot[:, None], step.pool_pages(state))
    assert method.decode.after_step is not None
    return method.decode.after_step(state, rows, *joint)


def _joint(plan: Plan, layer_table: tuple[int, ...], states: Any, tables: Any, live: Live, job: Job) -> tuple[Any, ...]:
    """What the seals of all layers share; a job of no tokens: what the trims of a slot share."""
    length = live.length.at[job.slot].get(mode="fill", fill_value=0)
    start = jnp.where(job.count > 0, job.start, length)
    rows = Rows(job.slot[None], start[None], job.count[None], job.slot[None, None], job.slot[None, None])
    return step.joined(plan.method, states, tuple(tables[i] for i in layer_table), rows)


def _trimmed(live: Live, slot: Array) -> Live:
    return live._replace(due=live.due.at[slot].set(False, mode="drop"))


def _forget(state: State, slot: Array, fresh: Array) -> State:
    """Zero the slot's row leaves where `fresh`."""

    def wipe(leaf: Array) -> Array:
        row = leaf.at[slot].get(mode="fill", fill_value=0)
        return leaf.at[slot].set(jnp.where(fresh, jnp.zeros_like(row), row), mode="drop")

    return State(state.pages, jax.tree.map(wipe, state.rows))


def _one(job: Job, slot: Array, table: Array, tokens: Array, state: State) -> Rows:
    rows = step.rows_of(table, slot[None], job.start[None], job.count[None], tokens, step.pool_pages(state))
    return rows._replace(turn=None if job.turn is None else job.turn[None])


def _chunk_unit(plan: Plan, index: int, weights: Any, state: State, table: Array, x: Array, carry: Any, tokens: Array, job: Job) -> Any:
    """One chunk through one layer, in place."""
    spec, method = plan.layers[index]
    state = _forget(state, job.slot, job.fresh)
    rows = _one(job, job.slot, table, tokens, state)
    x, state, carry = step.run_layer(weights, plan.model.config, spec, method.prefill, state, x, carry, rows)
    return state, x, carry


def _replay_unit(plan: Plan, index: int, weights: Any, state: State, table: Array, x: Array, carry: Any, ids: Array, job: Job) -> Any:
    """One of the method's passes through one layer."""
    spec, method = plan.layers[index]
    assert method.replay
    x, state, carry = step.run_layer(
        weights, plan.model.config, spec, method.replay, state, x, carry, _one(job, job.slot, table, ids, state)
    )
    return state, x, carry


def _stage_unit(
    plan: Plan, index: int, weights: Any, stage: State, x: Array, carry: Any, state: State, table: Array, tokens: Array, job: Job
) -> Any:
    """One chunk through one layer's stage; the sequence's older tokens are only read."""
    spec, method = plan.layers[index]
    stage = _forget(stage, job.stage, job.fresh)
    rows = _one(job, job.stage, jnp.asarray(plan.stage_table(method)[1], jnp.int32), tokens, stage)
    old = _one(job, job.slot, table, tokens, state)
    assert method.history is not None
    history = lambda qkv: method.history(state, qkv, old)  # type: ignore[misc]  # noqa: E731
    x, stage, carry = step.run_layer(weights, plan.model.config, spec, method.prefill, stage, x, carry, rows, history)
    return stage, x, carry


def _seal(plan: Plan, index: int, state: State, stage: State, table: Array, job: Job, target: Array) -> State:
    """Store a staged turn in slot `target`."""
    _, method = plan.layers[index]
    tokens = jnp.zeros((1, 1), jnp.int32)
    staged = _one(job, job.stage, jnp.asarray(plan.stage_table(method)[1], jnp.int32), tokens, stage)
    old, new = _one(job, job.slot, table, tokens, state), _one(job, target, table, tokens, state)
    assert method.seal is not None
    return method.seal(stage, state, staged, old, new)


def _seal_in_place(plan: Plan, index: int, state: State, table: Array, job: Job, *joint: Any) -> State:
    _, method = plan.layers[index]
    assert method.seal is not None
    return method.seal(state, _one(job, job.slot, table, jnp.zeros((1, 1), jnp.int32), state), *joint)


def _truncate(plan: Plan, layer_table: tuple[int, ...], states: Any, tables: Any, slot: Array, length: Array) -> Any:
    after = []
    for (_, method), state, i in zip(plan.layers, states, layer_table, strict=True):
        rows = step.rows_of(tables[i], slot[None], length[None], jnp.zeros(1, jnp.int32), slot[None, None], step.pool_pages(state))
        after.append(method.truncate(state, rows) if method.truncate else state)
    return tuple(after)


def _last(x: Array, at: Array) -> Array:
    """x[:, at]: [1,C,E] -> [1,E]."""
    return lax.dynamic_index_in_dim(x, at, axis=1, keepdims=False)


def _begin(plan: Plan, params: Any, live: Live, hidden: Array, slot: Array, record: Live) -> Any:
    """A prompt's end: sample the first token from hidden state [1,E] and let the slot decode."""
    logits = decoder.head(params, plan.model.config, hidden)
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], record)
    token, rows = live_rows.choose(logits, rows, jnp.ones(1, jnp.int32))
    return live_rows.store(live, slot[None], rows), token


def _set_live(live: Live, slot: Array, record: Live) -> Live:
    return jax.tree.map(lambda leaf, new: leaf.at[slot].set(new, mode="drop"), live, record)


def _set_table(table: Array, slot: Array, entries: Array) -> Array:
    return table.at[slot].set(entries, mode="drop")


def _held(counts: Any, slot: Array) -> Array:
    """Mean rows a slot holds over layers and heads, f32."""
    return jnp.mean(jnp.stack([jnp.mean(n.at[slot].get(mode="fill", fill_value=0).astype(jnp.float32)) for n in counts]))


def _pass(plan: Plan, index: Array, tokens: Array, length: Array) -> Any:
    """ids i32[1,W], how many of them are real, and the carry of the method's pass number `index` over tokens i32[max_len]."""
    assert plan.method.passes
    ids, count, carry = plan.method.passes.input(index, tokens, length)
    return ids[None], count, carry


def _used(plan: Plan, states: Any, slot: Array) -> Array:
    """Pages that a slot's first prompt needs in the layer where it is most: i32."""
    rows = Rows(slot[None], slot[None], slot[None], slot[None, None], slot[None, None])
    return jnp.max(jnp.stack([method.used(state, rows)[0] for (_, method), state in zip(plan.layers, states, strict=True) if method.used]))


def _take(state: State, table: Array, slot: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[table[slot]], state.pages), jax.tree.map(lambda leaf: leaf[slot], state.rows)


def _put(state: State, table: Array, slot: Array, session: Any) -> State:
    pages = jax.tree.map(lambda leaf, new: leaf.at[table[slot]].set(new, mode="drop"), state.pages, session[0])
    rows = jax.tree.map(lambda leaf, new: leaf.at[slot].set(new, mode="drop"), state.rows, session[1])
    return State(pages, rows)


def _shape(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree)


class Programs:
    """Compiled programs by name, and how often and how long anything was compiled."""

    def __init__(self, plan: Plan, layer_table: tuple[int, ...]):
        self.plan, self.layer_table = plan, layer_table
        self.compiles, self.seconds = 0, 0.0
        self.groups: list[int] = []  # layer -> first layer with the same program
        self._run: dict[Key, Any] = {}

    def __call__(self, name: str, *arguments: Any, layer: int = 0, bucket: int = 0) -> Any:
        return self._run[name, self.groups[layer] if layer else 0, bucket](*arguments)

    def rows_bucket(self, rows: int) -> int:
        """The smallest batch bucket that holds `rows`."""
        return min(b for b in self.row_buckets() if b >= rows)

    def row_buckets(self) -> list[int]:
        """1, 2, 4, ... and the largest batch."""
        largest = self.plan.sizes.rows
        return sorted({*(1 << i for i in range(largest.bit_length()) if 1 << i <= largest), largest})

    def warm(self, states: Any, stage: Any, tables: Any, live: Live, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything for these buffers: threads compile (without the interpreter's lock) while this one lowers.

        progress(done, known so far) is called as programs become ready.
        """
        began = time.perf_counter()
        lowered = itertools.chain(self._whole_programs(states, tables, live), self._layer_programs(states, stage, tables, live))
        with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
            waiting = {}
            for key, program in lowered:
                waiting[pool.submit(program.compile)] = key
                if progress:
                    progress(sum(f.done() for f in waiting), len(waiting))
            for done, future in enumerate(as_completed(waiting), 1):
                self._run[waiting[future]] = future.result()
                self.compiles += 1
                if progress:
                    progress(done, len(waiting))
        self.seconds += time.perf_counter() - began

    def _layer_programs(self, states: Any, stage: Any, tables: Any, live: Live) -> Iterator[tuple[Key, Any]]:
        """Prefill units, seals and trims: lowered for every layer at the smallest bucket, for others once a group."""
        plan, first, alike = self.plan, {}, {}
        params, scalar = _shape(plan.model.params), jax.ShapeDtypeStruct((), jnp.int32)
        job = Job(scalar, scalar, scalar, scalar, jax.ShapeDtypeStruct((), jnp.bool_))
        joint = jax.eval_shape(_bind(_joint, plan, self.layer_table), _shape(states), _shape(tables), _shape(live), job)
        carry: Any = None
        for index, (spec, method) in enumerate(plan.layers):
            state, table = _shape(states[index]), _shape(tables[self.layer_table[index]])

            def unit(chunk: int, index: int = index, state: Any = state, table: Any = table, carry: Any = carry) -> Any:
                hidden = plan.model.config.hidden_size
                x, tokens = jax.ShapeDtypeStruct((1, chunk, hidden), plan.model.dtype), jax.ShapeDtypeStruct((1, chunk), jnp.int32)
                one = job._replace(turn=jax.ShapeDtypeStruct((2,), jnp.int32))
                if stage is None:
                    f = jax.jit(_bind(_chunk_unit, plan, index), donate_argnums=1)
                    return f.lower(params["layers"][index], state, table, x, carry, tokens, one)
                f = jax.jit(_bind(_stage_unit, plan, index), donate_argnums=1)
                return f.lower(params["layers"][index], _shape(stage), x, carry, state, table, tokens, one)

            shapes = str((params["layers"][index], state, table, carry))
            if spec.kind_of is not None and (spec.kind_of, shapes) in alike:
                self.groups.append(alike[spec.kind_of, shapes])
                continue
            smallest = unit(plan.sizes.chunks[0])
            carry = smallest.out_info[2]
            seal = trim = None
            if stage is not None:
                f = jax.jit(_bind(_seal, plan, index), donate_argnums=0)
                seal = f.lower(state, _shape(stage), table, job, scalar)
            elif method.seal:
                seal = jax.jit(_bind(_seal_in_place, plan, index), donate_argnums=0).lower(state, table, job, *joint)
            if method.decode.after_step:
                f = jax.jit(_bind(_trim, plan, index), donate_argnums=0)
                trim = f.lower(state, table, _shape(live), jax.ShapeDtypeStruct((1,), jnp.int32), *joint)
            replay = self._replay(index, state, table) if method.replay else None
            text = "".join(program.as_text() for program in (smallest, seal, trim, replay) if program)
            group = first.setdefault(hashlib.sha256(text.encode()).digest(), index)
            self.groups.append(group)
            if spec.kind_of is not None and str((params["layers"][index], state, table, carry)) == shapes:
                alike[spec.kind_of, shapes] = group
            if group != index:
                continue
            yield ("unit", index, plan.sizes.chunks[0]), smallest
            for chunk in plan.sizes.chunks[1:]:
                yield ("unit", index, chunk), unit(chunk)
            if seal is not None:
                yield ("seal", index, 0), seal
            if trim is not None:
                yield ("trim", index, 0), trim
            if replay is not None:
                yield ("replay", index, 0), replay
            if plan.sizes.pages is not None:  # only sequences that grow are ever paused
                yield ("take", index, 0), jax.jit(_take).lower(state, table, scalar)
                moved = _shape(jax.eval_shape(_take, state, table, scalar))
                yield ("put", index, 0), jax.jit(_put, donate_argnums=0).lower(state, table, scalar, moved)

    def _pass(self) -> Any:
        """The program that makes a replay's input."""
        scalar, tokens = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((self.plan.sizes.max_len,), jnp.int32)
        return jax.jit(_bind(_pass, self.plan)).lower(scalar, tokens, scalar)

    def _replay(self, index: int, state: Any, table: Any) -> Any:
        ids, count, carry = self._pass().out_info
        job = Job(count, count, count, count, jax.ShapeDtypeStruct((), jnp.bool_))
        x = jax.ShapeDtypeStruct((*ids.shape, self.plan.model.config.hidden_size), self.plan.model.dtype)
        weights = _shape(self.plan.model.params["layers"][index])
        return jax.jit(_bind(_replay_unit, self.plan, index), donate_argnums=1).lower(weights, state, table, x, carry, ids, job)

    def _whole_programs(self, states: Any, tables: Any, live: Live) -> Iterator[tuple[Key, Any]]:
        """Programs over all layers, and the small ones."""
        plan, scalar = self.plan, jax.ShapeDtypeStruct((), jnp.int32)
        params, states_, tables_, live_ = _shape(plan.model.params), _shape(states), _shape(tables), _shape(live)
        outer = {k: v for k, v in params.items() if k != "layers"}
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), live_)
        trims = any(method.decode.after_step for _, method in plan.layers)
        for bucket in self.row_buckets():
            slot = jax.ShapeDtypeStruct((bucket,), jnp.int32)
            for name, (greedy, steps) in decodes(plan.sizes.burst).items():
                f = jax.jit(_bind(_steps, plan, self.layer_table, greedy, steps), donate_argnums=(1, 3))
                yield (name, 0, bucket), f.lower(params, states_, tables_, live_, slot)
        if trims:
            yield ("trimmed", 0, 0), jax.jit(_trimmed, donate_argnums=0).lower(live_, jax.ShapeDtypeStruct((1,), jnp.int32))
        if plan.method.joint:
            job = Job(scalar, scalar, scalar, scalar, jax.ShapeDtypeStruct((), jnp.bool_))
            yield ("joint", 0, 0), jax.jit(_bind(_joint, plan, self.layer_table)).lower(states_, tables_, live_, job)
        if any(method.truncate for _, method in plan.layers):
            f = jax.jit(_bind(_truncate, plan, self.layer_table), donate_argnums=0)
            yield ("truncate", 0, 0), f.lower(states_, tables_, scalar, scalar)
        passes = plan.method.passes
        if passes:
            yield ("pass", 0, 0), self._pass()
        if any(method.used for _, method in plan.layers):
            yield ("used", 0, 0), jax.jit(_bind(_used, plan)).lower(states_, scalar)
        again: tuple[int, ...] = (passes.width(plan.sizes.max_len),) if passes else ()
        for chunk in sorted({*plan.sizes.chunks, *again}):
            tokens = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
            x = jax.ShapeDtypeStruct((1, chunk, plan.model.config.hidden_size), plan.model.dtype)
            embed = jax.jit(lambda outer, tokens: decoder.embed(outer, plan.model.config, tokens))
            yield ("embed", 0, chunk), embed.lower(outer, tokens)
            yield ("last", 0, chunk), jax.jit(_last).lower(x, scalar)
        hidden = jax.ShapeDtypeStruct((1, plan.model.config.hidden_size), plan.model.dtype)
        begin = jax.jit(_bind(_begin, plan), donate_argnums=1)
        yield ("begin", 0, 0), begin.lower(outer, live_, hidden, scalar, one)
        yield ("set_live", 0, 0), jax.jit(_set_live, donate_argnums=0).lower(live_, scalar, one)
        for i, table in enumerate(tables_):
            entries = jax.ShapeDtypeStruct(table.shape[1:], jnp.int32)
            yield ("set_table", 0, i), jax.jit(_set_table, donate_argnums=0).lower(table, scalar, entries)
        yield ("held", 0, 0), jax.jit(_held).lower([s.rows["n"] for s in states_], scalar)


def _bind(f: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """f with its first, static arguments filled in."""
    return lambda *arguments: f(*static, *arguments)
