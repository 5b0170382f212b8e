"""How benches time: a compiled chain of calls, medians over repeats, beside the ceilings measured in the same process."""

from __future__ import annotations

import gzip
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

RESULTS = Path(__file__).parent / "results"


def seconds(program: Callable[..., Any], *args: Any, calls: int = 1, repeats: int = 7, queued: int = 4) -> float:
    """Median seconds of one of the `calls` that `program` makes in a chain; `queued` programs are in flight at once."""
    for _ in range(2):
        jax.block_until_ready(program(*args))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(queued):
            last = program(*args)
        jax.block_until_ready(last)
        taken.append((time.perf_counter() - began) / (calls * queued))
    return statistics.median(taken)


def kernel_times(program: Callable[..., Any], *args: Any) -> list[tuple[str, int, float, float]]:
    """What the card ran in one traced call: (kernel, times, median microseconds, median idle gap before it), in order."""
    jax.block_until_ready(program(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(*args))
        [file] = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    cards = {e["pid"] for e in events if e.get("name") == "process_name" and "GPU" in e["args"]["name"]}
    streams = {(e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name" and "Stream" in e["args"]["name"]}
    ran = [e for e in events if e.get("ph") == "X" and e["pid"] in cards and (e["pid"], e["tid"]) in streams]
    ran.sort(key=lambda e: e["ts"])
    found: dict[str, list[tuple[float, float]]] = {}
    end = ran[0]["ts"] if ran else 0.0
    for e in ran:
        found.setdefault(e["name"], []).append((e["dur"], e["ts"] - end))
        end = e["ts"] + e["dur"]
    middle = statistics.median
    return [(name, len(x), middle(took for took, _ in x), middle(gap for _, gap in x)) for name, x in found.items()]


def read_bandwidth(gigabytes: int = 4) -> float:
    """Bytes a second of a reduction over an array far larger than the L2: the best of three ways to sum it."""
    words = jax.random.bits(jax.random.key(0), (gigabytes * 2**18, 1024), jnp.uint32)
    ways = [
        lambda x: jnp.sum(lax_floats(x), dtype=jnp.float32),
        lambda x: jnp.sum(x),
        lambda x: jnp.max(x, axis=1),
    ]
    return max(words.nbytes / seconds(chain(way, 8), words, calls=8) for way in ways)


def lax_floats(words: jax.Array) -> jax.Array:
    """The same bits as fp32."""
    return jax.lax.bitcast_convert_type(words & 0x3FFFFFFF, jnp.float32)


def chain(way: Callable[[jax.Array], jax.Array], calls: int) -> Callable[[jax.Array], Any]:
    """`calls` passes of `way` that the compiler cannot fold into one."""

    def program(x: jax.Array) -> Any:
        found = []
        for _ in range(calls):
            found.append(way(x))
            x, found[-1] = jax.lax.optimization_barrier((x, found[-1]))
        return found

    return jax.jit(program)


def matmul_peak(size: int = 8192) -> float:
    """FLOP/s of a chain of square bf16 products on random data."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) / size**0.5 for i in (1, 2))

    def program(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(8):
            a = a @ b
        return a

    return 2 * size**3 / seconds(jax.jit(program), a, b, calls=8)


def commit() -> str:
    """The commit measured, or "unknown" where the checkout's history did not travel."""
    told = Path(__file__).parent / "COMMIT"
    if told.exists():
        return told.read_text().strip()
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return found.stdout.strip() or "unknown"


def record(file: str, case: str, value: float, unit: str, floor: float | None, ratio: float | None) -> dict[str, Any]:
    """Append one result line to bench/results/<file>.jsonl and print it. value and floor in `unit`."""
    device = jax.devices()[0].device_kind
    line = {"case": case, "value": value, "unit": unit, "floor": floor, "ratio": ratio}
    line = {key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in line.items()}
    line |= {"device": device, "jax": jax.__version__, "commit": commit(), "date": date.today().isoformat()}
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{file}.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")
    shown = [f"{x:10.4g}" if x is not None else " " * 10 for x in (value, floor, ratio)]
    print(f"{case:40s} {shown[0]} {unit:8s} floor {shown[1]} ratio {shown[2]}", flush=True)
    return line
