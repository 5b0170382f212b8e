"""Decode and prefill programs of the engine on a GPU, beside their byte or FLOP floor: `python -m bench.step [profile] [case ...]`.

Random bf16 weights of Qwen3 shapes, pools filled without a prefill, greedy sampling on the device, medians. Floors: a decode
step must read the weights once and what its method reads of the cache once, at the read bandwidth measured in this process.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sejax
from bench.timing import kernel_times, matmul_peak, read_bandwidth, record
from sejax.models import Config, Model
from sejax.models.family import PACKED, layer_shapes, top_shapes
from sejax.models.rope import Rope
from sejax.serve import live as live_rows
from sejax.serve.device import Device
from sejax.serve.plan import Plan, Sizes
from sejax.serve.programs import _bind, _decode
from sejax.types import LayerMethod, Rows, State

SHAPES = {
    "8b": dict(hidden_size=4096, heads=32, intermediate_size=12288, tie_embeddings=False),
    "4b": dict(hidden_size=2560, heads=32, intermediate_size=9728, tie_embeddings=True),
}
# case: (method, rows, tokens stored a row, tokens read in selecting layers or None, vLLM's dense ms, least ratio to the floor)
STEPS: dict[str, tuple[str, int, int, float | None, float | None]] = {
    "step_dense/b1_t1k": ("full", 1, 1024, None, 0.85),
    "step_dense/b1_t32k": ("full", 1, 32768, 6.39, 0.88),
    "step_dense/b16_t32k": ("full", 16, 32768, 23.18, 0.90),
    "step_dense/b1_t128k": ("full", 1, 131072, 9.79, 0.90),
    "step_dense/b4_t128k": ("full", 4, 131072, 23.32, 0.90),
    "step_quest/b16_t32k_k2k": ("quest:budget=2048", 16, 32768, 23.18, 0.78),
    "step_quest/b4_t128k_k2k": ("quest:budget=2048", 4, 131072, 23.32, 0.78),
    "step_quest_lean/b16_t32k_k2k": ("quest:budget=2048,page=32", 16, 32768, 23.18, 0.78),
    "step_quest_lean/b4_t128k_k2k": ("quest:budget=2048,page=32", 4, 131072, 23.32, 0.78),
    "step_snapkv/b64_k4k": ("snapkv:budget=4096,slack=288", 64, 4096, None, 0.87),
    "batch_full/b5_t128k": ("full", 5, 131072, None, None),
    "batch_snapkv/t128k_k8k": ("snapkv:budget=8192,slack=288", 84, 8192, None, None),
}


def random_model(shape: str) -> Model:
    """A Qwen3-shaped model with random bf16 weights, made on the device."""
    config = Config(
        family="qwen3",
        vocab_size=151936,
        layers=36,
        kv_heads=8,
        head_dim=128,
        rope=Rope(128, theta=1e6),
        qk_norm=True,
        max_position=2**18,
        **SHAPES[shape],  # type: ignore[arg-type]
    )
    make = jax.jit(lambda key, s: jax.random.normal(key, s, jnp.bfloat16) * 0.02, static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def tensor(name: str, size: tuple[int, ...]) -> jax.Array:
        return jnp.ones(size, jnp.bfloat16) if name.endswith("norm") else make(next(keys), size)

    params: dict[str, Any] = {name: tensor(name, size) for name, size in top_shapes(config).items()}
    shapes = layer_shapes(config)
    for name, parts in PACKED.items():
        sizes = [shapes.pop(part) for part in parts]
        shapes[name] = (sum(size[0] for size in sizes), sizes[0][1])
    params["layers"] = tuple({n: tensor(n, s) for n, s in shapes.items()} for _ in range(config.layers))
    return Model(params, config)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(2, 3))
def _fill(x: jax.Array, key: jax.Array, low: float, high: float) -> jax.Array:
    return jax.random.uniform(key, x.shape, jnp.bfloat16, low, high).astype(x.dtype)


def filled(state: State, length: int, key: jax.Array) -> State:
    """The state with random keys and values, every slot holding `length` rows."""

    def leaf(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if x.dtype == jnp.int32 or "ring" in name:
            return x
        low, high = {"low": (-3.0, 0.0), "high": (0.0, 3.0)}.get(name.split("'")[-2], (-1.7, 1.7))
        return _fill(x, jax.random.fold_in(key, hash(name) % 2**31), low, high)

    pages = jax.tree_util.tree_map_with_path(leaf, state.pages)
    return State(pages, state.rows | {"n": jnp.full_like(state.rows["n"], length)})


def weight_bytes(model: Model) -> int:
    """Bytes a step reads of the weights: all but the embedding table, of which it reads one row a token."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return total if model.config.tie_embeddings else total - model.params["embed"].nbytes


def cache_bytes(model: Model, method: Any, rows: int, length: int) -> int:
    """Bytes a step must read of the cache: what each layer's method lists, and its index once."""
    config, arguments = model.config, dict(method.arguments)
    token = 2 * config.kv_heads * config.head_dim * 2
    if "dense_layers" not in arguments:
        return rows * length * token * config.layers
    page, dense = arguments["page"], arguments["dense_layers"]
    selecting = config.layers - dense
    index = length // page * token  # two bounds a page, each as large as a key
    return rows * (dense * length * token + selecting * (index + min(length, arguments["budget"]) * token))


Advance = Callable[[], jax.Array]
Kept = Callable[[LayerMethod], int]


def stepper(model: Model, method: Any, rows: int, length: int, kept: Kept | None = None, indexed: bool = False) -> Callable[[], Advance]:
    """Compiles one decode step of `rows` sequences of `length` tokens. What it returns allocates and fills the pools, and gives a
    function that dispatches a step and returns its tokens.

    kept: rows a layer holds of them, from its record (default: all); indexed: the method's prompt end runs over the filled pools first.
    """
    room = length + 512
    plan = Plan(model, method, Sizes(rows, rows, room, None, (), (32,)))
    records = [record for _, record in plan.layers]
    widths = sorted({plan.width(r) for r in records})
    layer_table = tuple(widths.index(plan.width(r)) for r in records)
    slots = np.arange(rows, dtype=np.int32)

    def given() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(1), len(records))
        held = [kept(r) if kept else length for r in records]
        states = tuple(filled(r.decode.init(rows, plan.pool(r)), n, k) for r, n, k in zip(records, held, keys, strict=True))
        order = np.random.default_rng(0)
        tables = tuple(jnp.asarray(order.permutation(rows * w).reshape(rows, w), jnp.int32) for w in widths)
        live = live_rows.empty(rows)
        live = live._replace(
            length=jnp.full(rows, length, jnp.int32), left=jnp.full(rows, 2**30, jnp.int32), stop=jnp.full_like(live.stop, -1),
            forced=jnp.full_like(live.forced, -1),
        )  # fmt: skip
        return states, tables, live

    program = jax.jit(_bind(_decode, plan, layer_table, True), donate_argnums=(1, 3))
    states_, tables_, live_ = jax.eval_shape(given)
    program = program.lower(model.params, states_, tables_, live_, slots).compile()
    prompts = [jnp.arange(rows), jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)]
    seals: list[Any] = [None] * len(records)
    for i, r in enumerate(records if indexed else ()):
        if r.seal:
            now = Rows(*prompts, tables_[layer_table[i]], jnp.zeros((rows, 1), jnp.int32))
            seals[i] = jax.jit(r.seal, donate_argnums=0).lower(states_[i], now).compile()

    def start() -> Advance:
        states, tables, live = given()
        sealed = []
        for state, seal, i in zip(states, seals, layer_table, strict=True):
            sealed.append(seal(state, Rows(*prompts, tables[i], jnp.zeros((rows, 1), jnp.int32))) if seal else state)
        states = tuple(sealed)

        def advance() -> jax.Array:
            nonlocal states, live
            states, live, out = program(model.params, states, tables, live, slots)
            return out

        return advance

    return start


def compiled(makers: dict[Any, Callable[[], Callable[[], Advance]]]) -> dict[Any, Callable[[], Advance] | Exception]:
    """Calls every maker in threads of its own; a case that fails must not cost the others."""

    def one(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            return error

    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(makers, pool.map(one, makers.values()), strict=True))
    print(f"{len(found)} programs in {time.perf_counter() - began:.0f} s", flush=True)
    return found


def step_seconds(advance: Callable[[], jax.Array], steps: int = 24, repeats: int = 5) -> float:
    """Median seconds of a decode step, steps dispatched one behind the other."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for _ in range(steps):
            out = advance()
        jax.block_until_ready(out)
        taken.append((time.perf_counter() - began) / steps)
    assert int(out[0, 0]) >= 0, "the rows did not take part"
    return statistics.median(taken[1:])


def show_kernels(advance: Callable[[], jax.Array], most: int = 14) -> None:
    """What one step spends its time on: kernel, times a step, microseconds each, share of the step's busy time."""
    found = kernel_times(advance)
    busy = sum(count * each for _, count, each, _ in found)
    for name, count, each, gap in sorted(found, key=lambda k: -k[1] * k[2])[:most]:
        print(f"    {name[:60]:60s} {count:5d} x {each:8.1f} us (gap {gap:5.1f}) {count * each / busy:6.1%}", flush=True)
    print(f"    {sum(k[1] for k in found)} kernels, {busy / 1e3:.2f} ms busy", flush=True)


def steps(names: list[str], bandwidth: float, profile: bool) -> None:
    model = random_model("8b")
    methods = {name: sejax.method(STEPS[name][0]) for name in names}
    makers = {name: functools.partial(stepper, model, methods[name], *STEPS[name][1:3]) for name in names}
    for name, start in compiled(makers).items():
        _, rows, length, vllm, least = STEPS[name]
        try:
            if isinstance(start, Exception):
                raise start
            advance = start()
            seconds = step_seconds(advance)
            if profile:
                show_kernels(advance)
            del advance
        except Exception as error:  # a cell that does not fit must not cost the others
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            gc.collect()
            continue
        floor = (weight_bytes(model) + cache_bytes(model, methods[name], rows, length)) / bandwidth
        record("step", name, seconds * 1e3, "ms", floor * 1e3, floor / seconds)
        notes = [f"{rows / seconds:.0f} tok/s", f"floor ratio {floor / seconds:.3f} (at least {least})"]
        notes += [f"{vllm / seconds / 1e3:.2f}x vLLM's dense step"] if vllm else []
        print("   " + "; ".join(notes), flush=True)
        gc.collect()


def host_gap() -> None:
    """Time the engine's loop adds to a step: tokens read one step late, against steps that are only dispatched."""
    model = random_model("4b")
    device = Device(model, sejax.method("full"), Sizes(1, 1, 2048, 2048 // 16, (), (32,)))
    device.set_pages(0, list(range(2048 // 16)))
    for x, _ in device.prefill([1] * 32, 0, 0, 0, 0, True):
        jax.block_until_ready(x)

    def run(read: bool, count: int = 200) -> float:
        device.set_live(0, live_rows.record(sejax.Sampling(), (), 32, 1, 2**20, 0, 0))
        began, last = time.perf_counter(), None
        for _ in range(count):
            out = device.decode([0], True)
            if read and last is not None:
                np.asarray(last)
            last = out
        np.asarray(last)
        return (time.perf_counter() - began) / count

    run(True), run(False)
    pairs = [(run(True), run(False)) for _ in range(5)]
    read, free = (statistics.median(p) for p in zip(*pairs, strict=True))
    record("step", "host_gap/4b_b1", (read - free) * 1e3, "ms", free * 1e3, read / free - 1)


def prefill(peak: float, tokens: int = 32768, chunk: int = 8192) -> None:
    """A whole prompt through the engine's units."""
    model = random_model("8b")
    device = Device(model, sejax.method("full"), Sizes(1, 1, tokens, tokens // 16, (), (chunk,)))
    device.set_pages(0, list(range(tokens // 16)))
    ids = np.random.default_rng(0).integers(0, 150000, tokens).tolist()
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        for x, _ in device.prefill(ids, 0, 0, 0, 0, True):
            last = x
        jax.block_until_ready(last)
        taken.append(time.perf_counter() - began)
    seconds, config = statistics.median(taken), model.config
    matrices = sum(leaf.size for layer in model.params["layers"] for leaf in layer.values())
    flops = 2 * matrices * tokens + 2 * config.layers * config.heads * config.head_dim * tokens**2
    record("step", "prefill_8b/t32k", seconds * 1e3, "ms", flops / peak * 1e3, flops / peak / seconds)


def main(asked: list[str]) -> None:
    profile = "profile" in asked
    asked = [a for a in asked if a != "profile"]
    known = [*STEPS, "host_gap/4b_b1", "prefill_8b/t32k"]
    names = [n for n in known if not asked or any(n.startswith(a) for a in asked)]
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    steps([n for n in names if n in STEPS], bandwidth, profile)
    gc.collect()
    if "host_gap/4b_b1" in names:
        host_gap()
        gc.collect()
    if "prefill_8b/t32k" in names:
        peak = matmul_peak()
        print(f"matmul peak {peak / 1e12:.0f} TFLOP/s", flush=True)
        prefill(peak)


if __name__ == "__main__":
    main(sys.argv[1:])
