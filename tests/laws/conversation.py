"""What the laws share: a tiny model, one conversation, and each case's programs, compiled ahead and once.

Programs have few shapes: prompts are padded to TURN tokens in chunks of CHUNK, decode steps have 1 or SLOTS rows. Being compiled ahead,
they refuse arguments of any other shape or type instead of compiling again.
"""

import concurrent.futures
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sejax import functional, methods
from sejax.functional import Cache
from tests.cases import CASES, Case
from tests.models.tiny import tiny_model
from tests.oracles.transformer import Layer, Transformer

PRIMARY = [case for case in CASES if not case.variant]
SLOTS, MAX_LEN, TURN, CHUNK, ODD = 4, 128, 32, 16, 7
LAYERS = 2
# Only LLVM's effort is lowered: compiling dominates these tests, and the compiled HLO stays as it is.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

TURNS = (("prompt", 20), ("decode", 7), ("prompt", 9), ("decode", 6), ("prompt", 31), ("decode", 10), ("prompt", 1), ("decode", 3))


@functools.cache
def model():
    return tiny_model(layers=LAYERS)


def words(seed: int = 0) -> list[list[int]]:
    """Token ids of each turn of TURNS."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model().config.vocab_size, count).tolist() for _, count in TURNS]


class Programs:
    """The functional API of one method, jitted as its documentation says (the cache donated) and compiled ahead."""

    def __init__(self, spec: str) -> None:
        self.method, _ = methods.method(spec), model()  # the model is made here, outside any trace
        self.lowered: dict[Any, Any] = {}
        self.compiled: dict[Any, Any] = {}

    def cache(self, slots: int = SLOTS) -> Cache:
        return functional.init(model(), self.method, slots=slots, max_len=MAX_LEN)

    def lower(self, name: str, size: int, slots: int = SLOTS) -> Any:
        key = (name, size, slots)
        if key not in self.lowered:
            cache, i32 = jax.eval_shape(lambda: self.cache(slots)), jax.ShapeDtypeStruct((), jnp.int32)
            if name == "decode":
                rows = jax.ShapeDtypeStruct((size,), jnp.int32)
                jitted = jax.jit(functional.decode, static_argnums=1, donate_argnums=2)
                self.lowered[key] = jitted.lower(model(), self.method, cache, rows, rows)
            else:  # a prompt, in chunks of `size`
                tokens = jax.ShapeDtypeStruct((-(-TURN // size) * size,), jnp.int32)
                jitted = jax.jit(functional.prefill, static_argnums=1, static_argnames="chunk", donate_argnums=2)
                self.lowered[key] = jitted.lower(model(), self.method, cache, tokens, i32, i32, chunk=size)
        return self.lowered[key]

    def prepare(self, *wanted: tuple) -> None:
        """Compile side by side what is not there yet."""
        keys = [(*w, SLOTS)[:3] for w in wanted]
        keys = [k for k in keys if k not in self.compiled]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            self.compiled |= dict(zip(keys, threads.map(lambda low: low.compile(QUICK), [self.lower(*k) for k in keys]), strict=True))

    def program(self, *key: Any) -> Any:
        self.prepare(key)
        return self.compiled[(*key, SLOTS)[:3]]

    def prefill(self, cache: Cache, tokens: list[int], slot: int, chunk: int = CHUNK) -> tuple[np.ndarray, Cache]:
        padded = np.zeros(-(-TURN // chunk) * chunk, np.int32)
        padded[: len(tokens)] = tokens
        program = self.program("prefill", chunk, cache.slots)
        logits, cache = program(model(), cache, jnp.asarray(padded), jnp.int32(slot), jnp.int32(len(tokens)))
        return np.asarray(logits), cache

    def decode(self, cache: Cache, tokens: list[int], slots: list[int]) -> tuple[np.ndarray, Cache]:
        program = self.program("decode", len(tokens), cache.slots)
        logits, cache = program(model(), cache, jnp.asarray(tokens, jnp.int32), jnp.asarray(slots, jnp.int32))
        return np.asarray(logits), cache

    def run(self, cache: Cache, slot: int, turns: Any, row: int | None = None, chunk: int = CHUNK, after: Any = None) -> tuple[Any, Cache]:
        """Turns of (kind, ids) -> (logits, one row for each prompt and each decoded token; cache).

        row: None decodes with one row; else with SLOTS rows of which this one is ours and the others are idle.
        after(cache): called after every prompt and every decoded token.
        """
        found = []
        for kind, ids in turns:
            if kind == "prompt":
                logits, cache = self.prefill(cache, ids, slot, chunk)
                found.append(logits)
                if after:
                    after(cache)
                continue
            for token in ids:
                at = 0 if row is None else row
                tokens, slots = ([token], [slot]) if row is None else ([0] * SLOTS, [SLOTS] * SLOTS)
                tokens[at], slots[at] = token, slot
                logits, cache = self.decode(cache, tokens, slots)
                found.append(logits[at])
                if after:
                    after(cache)
        return np.stack(found), cache


@functools.lru_cache(maxsize=8)  # a process can map only so much code: all cases' programs together are too many
def programs(spec: str) -> Programs:
    return Programs(spec)


def turns(seed: int = 0) -> list[tuple[str, list[int]]]:
    return [(kind, ids) for (kind, _), ids in zip(TURNS, words(seed), strict=True)]


@functools.cache
def straight(spec: str, seed: int = 0) -> tuple[np.ndarray, tuple]:
    """The conversation in slot 1, one decode row: logits, and after each step what is held (a list of i32[H,capacity] a layer)."""
    p, held = programs(spec), []
    p.prepare(("prefill", CHUNK), ("decode", 1), ("decode", SLOTS))
    logits, _ = p.run(p.cache(), 1, turns(seed), after=lambda cache: held.append(kept(cache, 1)))
    return logits, tuple(held)


def kept(cache: Cache, slot: int) -> list[list[list[int]]]:
    """[layer][kv head] -> positions still held, ascending."""
    return [[[p for p in head if p >= 0] for head in layer.tolist()] for layer in jax.device_get(_kept(cache, jnp.int32(slot)))]


_kept = jax.jit(functional.kept)


@functools.lru_cache(maxsize=4)
def take(method: Any) -> Any:
    """functional.take compiled for a method's caches (sizes are this file's)."""
    cache = jax.eval_shape(lambda: functional.init(model(), method, SLOTS, MAX_LEN))
    jitted = jax.jit(functional.take).lower(cache, jnp.int32(0)).compile(QUICK)
    return lambda cache, slot: jitted(cache, jnp.int32(slot))


@functools.lru_cache(maxsize=4)
def put(method: Any) -> Any:
    cache = jax.eval_shape(lambda: functional.init(model(), method, SLOTS, MAX_LEN))
    session = jax.eval_shape(functional.take, cache, 0)
    jitted = jax.jit(functional.put, donate_argnums=0).lower(cache, jnp.int32(0), session).compile(QUICK)
    return lambda cache, slot, session: jitted(cache, jnp.int32(slot), session)


def oracle(spec: str) -> Transformer:
    """The oracle's model for a method, or for several: "how prompts are read + retention + selection"."""
    config = model().config
    made = [_oracle_layers(part) for part in spec.split("+")]
    for layers in zip(*made, strict=True):
        first, *others = sorted(layers, key=lambda layer: getattr(layer, "reads_prompts", False))
        for other in others:
            setattr(first, "prompter" if getattr(other, "reads_prompts", False) else "reader", other)
        for layer in layers:
            layer.call = CHUNK
    made.sort(key=lambda layers: getattr(layers[0], "reads_prompts", False))
    return Transformer(model().params, config, made[0])


def _oracle_layers(spec: str) -> list[Layer]:
    method, config = methods.method(spec), model().config
    arguments = dict(method.arguments)
    arguments["heads_mode"] = arguments.pop("heads", "each")
    layer: type[Layer] = importlib.import_module(f"tests.oracles.{method.name}").Oracle
    return [layer(i, config.layers, config.kv_heads, **arguments) for i in range(config.layers)]


def copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def equal(a: Any, b: Any) -> bool:
    """Bit-equal trees (NaN equals NaN)."""
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def close(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-4) -> bool:
    """Within `tolerance` of the largest logit's size (at least 1): fp32 rounding grows with it."""
    return bool(np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max()))


def each(cases: Sequence[Case] = CASES) -> pytest.MarkDecorator:
    """Parametrize a law by the cases it is for; a method's variants are slow tests.

    Tests are grouped by case, whatever file they are in: its programs are compiled once, and let go before they are too many.
    """
    params = [pytest.param(case, id=case.spec.replace(":", "-"), marks=[pytest.mark.slow] if case.variant else []) for case in cases]
    return pytest.mark.parametrize("case", params, scope="session")
