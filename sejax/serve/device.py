"""The engine's buffers on the device and the calls that change them: one owner, the engine thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sejax.kernels.launch import on_gpu
from sejax.models import Model
from sejax.serve import live as live_rows
from sejax.serve.live import Live
from sejax.serve.plan import Job, Plan, Sizes
from sejax.serve.programs import Programs
from sejax.types import Array, Method


class Device:
    """Layer states, prefill stage, page tables and live rows. Methods dispatch and return without waiting."""

    def __init__(self, model: Model, method: Method, sizes: Sizes, progress: Callable[[int, int], None] | None = None):
        self.plan = Plan(model, method, sizes)
        self.model, self.method, self.sizes = model, method, sizes
        layers = [record for _, record in self.plan.layers]
        widths = sorted({self.plan.width(record) for record in layers})
        self.layer_table = tuple(widths.index(self.plan.width(record)) for record in layers)
        self.page = layers[0].page
        self.pages_of = functools.cache(lambda tokens: max(record.pages(tokens) for record in layers))
        self.truncates = all(record.truncate for record in layers)
        self.states = [record.decode.init(sizes.slots, self.plan.pool(record)) for record in layers]
        self.width = method.passes.width(sizes.max_len) if method.passes else 0  # tokens of a replay
        self.stage = None
        if sizes.stages:
            self.stage = layers[0].prefill.init(len(sizes.stages), self.plan.stage_table(layers[0])[0])
        if sizes.pages is None:
            self.tables = [jnp.arange(sizes.slots * w, dtype=jnp.int32).reshape(sizes.slots, w) for w in widths]
        else:
            self.tables = [jnp.full((sizes.slots, w), sizes.pages, jnp.int32) for w in widths]
        self.live: Live = live_rows.empty(sizes.slots)
        self.outer = {k: v for k, v in model.params.items() if k != "layers"}
        self.programs = Programs(self.plan, self.layer_table)
        self.programs.warm(tuple(self.states), self.stage, tuple(self.tables), self.live, progress)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for cache state, stage included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.states, self.stage)))

    def chunks(self, count: int) -> list[int]:
        """Bucket sizes that cover `count` tokens: largest first, the rest padded to the smallest that holds it."""
        sizes, found = self.sizes.chunks, []
        while count > 0:
            fitting = [c for c in sizes if c <= count]
            bucket = sizes[-1] if count >= sizes[-1] else min(c for c in sizes if c >= count)
            smaller = fitting[-1] if fitting else bucket
            # 140 tokens run as 128 + 32 rather than as 512: padding costs as much as tokens do.
            found.append(smaller if bucket >= 2 * count and smaller < count else bucket)
            count -= found[-1]
        return found

    def prefill(self, tokens: list[int], start: int, slot: int, target: int, stage: int, fresh: bool) -> Iterator[tuple[Array, int]]:
        """The units of one prompt; yields (hidden state, bucket) after each. The last one's are what `begin` needs.

        slot: the sequence so far (S: none); target: where it goes (in-place methods: the slot itself); fresh: it is new.
        """
        pieces, at = [], 0
        for bucket in self.chunks(len(tokens)):
            ids = np.zeros((1, bucket), np.int32)
            count = min(bucket, len(tokens) - at)
            ids[0, :count] = tokens[at : at + count]
            pieces.append((ids, bucket, start + at, count))
            at += count
        return self._staged(pieces, slot, target, stage) if self.stage is not None else self._in_place(pieces, slot, fresh)

    def _in_place(self, pieces: list[Any], slot: int, fresh: bool) -> Iterator[tuple[Array, int]]:
        turn = _turn(pieces)
        for number, (ids, bucket, start, count) in enumerate(pieces):
            job = _job(slot, slot, start, count, fresh and number == 0)._replace(turn=turn)
            x, carry = self.programs("embed", self.outer, ids, bucket=bucket), None
            for layer, weights in enumerate(self.model.params["layers"]):
                state, table = self.states[layer], self.tables[self.layer_table[layer]]
                found = self.programs("unit", weights, state, table, x, carry, ids, job, layer=layer, bucket=bucket)
                self.states[layer], x, carry = found
                yield x, bucket
        first, last = pieces[0], pieces[-1]
        whole = _job(slot, slot, first[2], last[2] + last[3] - first[2], False)
        if fresh and self.width:
            yield from self._replayed(np.concatenate([ids[0, :count] for ids, _, _, count in pieces]), slot)
        joint = self._joint(whole)
        for layer, (_, record) in enumerate(self.plan.layers):
            if record.seal:
                table = self.tables[self.layer_table[layer]]
                self.states[layer] = self.programs("seal", self.states[layer], table, whole, *joint, layer=layer)
        if fresh and self.width:
            yield x, bucket

    def _replayed(self, tokens: np.ndarray, slot: int) -> Iterator[tuple[Array, int]]:
        """The method's passes over a first prompt i32[T], a unit for each and layer."""
        passes = self.method.passes
        assert passes
        padded = np.pad(tokens, (0, self.sizes.max_len - len(tokens)))
        for index in range(passes.number(padded, len(tokens))):
            ids, count, carry = self.programs("pass", np.int32(index), padded, np.int32(len(tokens)))
            job, x = (
                _job(slot, slot, len(tokens), 0, False)._replace(count=count),
                self.programs("embed", self.outer, ids, bucket=self.width),
            )
            for layer, weights in enumerate(self.model.params["layers"]):
                state, table = self.states[layer], self.tables[self.layer_table[layer]]
                self.states[layer], x, carry = self.programs("replay", weights, state, table, x, carry, ids, job, layer=layer)
                yield x, self.width

    def _joint(self, job: Job) -> tuple[Any, ...]:
        """What the seals or trims of all layers share."""
        return self.programs("joint", tuple(self.states), tuple(self.tables), self.live, job) if self.method.joint else ()

    def _staged(self, pieces: list[Any], slot: int, target: int, stage: int) -> Iterator[tuple[Array, int]]:
        hidden = [self.programs("embed", self.outer, ids, bucket=bucket) for ids, bucket, _, _ in pieces]
        carries: list[Any] = [None] * len(pieces)
        first, last = pieces[0], pieces[-1]
        whole = _job(stage, slot, first[2], last[2] + last[3] - first[2], False)
        for layer, weights in enumerate(self.model.params["layers"]):
            table = self.tables[self.layer_table[layer]]
            for i, (ids, bucket, start, count) in enumerate(pieces):
                job = _job(stage, slot, start, count, i == 0)._replace(turn=_turn(pieces))
                state = self.states[layer]
                arguments = (weights, self.stage, hidden[i], carries[i], state, table, ids, job)
                self.stage, hidden[i], carries[i] = self.programs("unit", *arguments, layer=layer, bucket=bucket)
                if i < len(pieces) - 1:
                    yield hidden[i], bucket
            # The next layer starts the stage anew: this one is sealed first.
            self.states[layer] = self.programs("seal", self.states[layer], self.stage, table, whole, np.int32(target), layer=layer)
            yield hidden[-1], pieces[-1][1]

    def begin(self, x: Array, bucket: int, at: int, slot: int, record: Live) -> Array:
        """Sample a prompt's first token from hidden state x[:, at] and let `slot` decode: -> i32[1]."""
        hidden = self.programs("last", x, np.int32(at), bucket=bucket)
        self.live, token = self.programs("begin", self.outer, self.live, hidden, np.int32(slot), record)
        token.copy_to_host_async()
        return token

    def decode(self, slots: list[int], greedy: bool = False, steps: int = 1) -> Array:
        """One step, or a burst, for these slots, all of them greedy or not: -> i32[steps,2,B], tokens (-1: no part) and due flags."""
        bucket = self.programs.rows_bucket(len(slots))
        padded = np.full(bucket, self.sizes.slots, np.int32)
        padded[: len(slots)] = slots
        name = ("decode" if steps == 1 else "burst") + ("_greedy" if greedy and on_gpu() else "")
        states, self.live, out = self.programs(
            name, self.model.params, tuple(self.states), tuple(self.tables), self.live, padded, bucket=bucket
        )
        self.states = list(states)
        out.copy_to_host_async()
        return out

    def trim(self, slot: int) -> None:
        """Make room in a slot that is due."""
        row = np.array([slot], np.int32)
        joint = self._joint(_job(slot, slot, 0, 0, False))
        for layer, (_, record) in enumerate(self.plan.layers):
            if record.decode.after_step:
                table = self.tables[self.layer_table[layer]]
                self.states[layer] = self.programs("trim", self.states[layer], table, self.live, row, *joint, layer=layer)
        self.live = self.programs("trimmed", self.live, row)

    def truncate(self, slot: int, length: int) -> None:
        """Drop a slot's tokens at positions >= length."""
        self.states = list(self.programs("truncate", tuple(self.states), tuple(self.tables), np.int32(slot), np.int32(length)))

    def set_live(self, slot: int, record: Live) -> None:
        self.live = self.programs("set_live", self.live, np.int32(slot), record)

    def set_pages(self, slot: int, pages: list[int]) -> None:
        """Write a slot's run into the tables."""
        for i, table in enumerate(self.tables):
            entries = np.full(table.shape[1], self.sizes.pages or 0, np.int32)
            entries[: len(pages)] = pages
            self.tables[i] = self.programs("set_table", table, np.int32(slot), entries, bucket=i)

    def held(self, slot: int) -> Array:
        """Mean rows the slot holds over layers and heads: -> f32."""
        out = self.programs("held", [state.rows["n"] for state in self.states], np.int32(slot))
        out.copy_to_host_async()
        return out

    def used(self, slot: int) -> Array | None:
        """Pages that the slot's first prompt needs now, in the layer where it is most: -> i32; None: as many as before."""
        if not all(record.used for _, record in self.plan.layers):
            return None
        out = self.programs("used", tuple(self.states), np.int32(slot))
        out.copy_to_host_async()
        return out

    def take(self, slot: int) -> list[Any]:
        """What a slot holds, on the host, layer by layer."""
        return [
            jax.device_get(self.programs("take", state, self.tables[i], np.int32(slot), layer=layer))
            for layer, (state, i) in enumerate(zip(self.states, self.layer_table, strict=True))
        ]

    def put(self, slot: int, session: list[Any]) -> None:
        """Fill a slot with what `take` gave; its pages are set before."""
        for layer, saved in enumerate(session):
            table = self.tables[self.layer_table[layer]]
            self.states[layer] = self.programs("put", self.states[layer], table, np.int32(slot), saved, layer=layer)


def _turn(pieces: list[Any]) -> np.ndarray:
    return np.array([pieces[0][2], pieces[-1][2] + pieces[-1][3]], np.int32)


def _job(stage: int, slot: int, start: int, count: int, fresh: bool) -> Job:
    return Job(np.int32(stage), np.int32(slot), np.int32(start), np.int32(count), np.bool_(fresh))
