"""Decode step time against context length, every method, on a GPU: `python -m bench.methods [NAME ...]`, which also writes the
figure and table of docs/performance.md (`... draw`: from the results there are).

Programs of Qwen3-8B's layers, 16 rows, random bf16 weights and pools filled without a prefill, for DEPTHS layers each; the time of 36
layers follows from the difference. What a method keeps is filled as after a prompt of that length. Left out: flashprefill (prompts only).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import sys

import sejax
from bench.plot import Panel, chart, insert
from bench.step import compiled, random_model, step_seconds, stepper
from bench.timing import RESULTS, record
from sejax.types import LayerMethod

ROWS, LAYERS, DEPTHS = 16, 36, (5, 9)  # the fifth layer is the first that follows, under omnikv; all later ones are like it
CONTEXTS = (8192, 32768, 65536)
# spec; rows kept of a longer context, as a number, as a fraction, or all; whether its prompt's end builds an index
type Spec = tuple[str, int | float | None, bool]
SLACK = 1024
SPECS: dict[str, Spec] = {
    "full": ("full", None, False),
    "streamingllm": ("streamingllm:sinks=4,recent=4092", 4096, False),
    "snapkv": ("snapkv:budget=4096", 4096, False),
    "pyramidkv": (f"pyramidkv:budget=4096,slack={SLACK}", -SLACK, False),  # each layer its own budget: its run without the slack
    "adakv": ("adakv:budget=4096", 4096, False),
    "h2o": ("h2o:budget=4096", 4096, False),
    "tova": ("tova:budget=4096,period=128", 4096, False),
    "rkv": ("rkv:budget=4096", 4096, False),
    "skipkv": ("skipkv:budget=4096,delimiters=(198,271)", 4096, False),
    "expected_attention": ("expected_attention:budget=4096", 4096, False),
    "keydiff": ("keydiff:budget=4096", 4096, False),
    "quest": ("quest:budget=2048", None, False),
    "omnikv": ("omnikv:observers=(2,),ratio=0.067", None, True),
    "retroinfer": ("retroinfer", None, True),
    "kvzip": ("kvzip:ratio=0.3,instruction_ids=(1,2)", 0.3, False),
    "rkv_quest": ("rkv:budget=4096 + quest:budget=1024", 4096, False),
}


IMAGE = "![Milliseconds of a decode step against the tokens of each row, by method](methods.svg)"
PAGE = RESULTS.parents[1] / "docs/performance.md"


def held(most: int | float | None, context: int, record: LayerMethod) -> int:
    """Rows that a layer holds after a prompt of `context` tokens; `most` a float: their share; negative: its run without that many."""
    if isinstance(most, float):
        return int(most * context)
    return min(context, context if most is None else most if most > 0 else record.run(context) + most)


def draw() -> None:
    """The figure and the table, from each case's latest line."""
    rows = map(json.loads, (RESULTS / "methods.jsonl").read_text().splitlines())
    values = {tuple(row["case"].split("/")[1:]): row["value"] for row in rows}
    columns = {context: f"b{ROWS}_t{context // 1024}k" for context in CONTEXTS}
    lines = {n: [(c, values[n, case]) for c, case in columns.items() if (n, case) in values] for n in SPECS}
    lines = {name: points for name, points in lines.items() if points}
    top = max(y for points in lines.values() for _, y in points)
    ticks = {y: f"{y}" for y in (6, 8, 12, 16, 24, 32, 48, 64) if y < 1.4 * top}
    whole = {name: points for name, points in lines.items() if len(points) == len(columns)}
    xs = {context: f"{context // 1024}K" for context in columns}
    panel = Panel(f"ms a decode step, {ROWS} rows", "tokens of each row", whole, xs, ticks, math.log, math.log)
    PAGE.with_name("methods.svg").write_text(chart([panel]))
    table = ["| method | " + " | ".join(f"{c // 1024}K" for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, points in lines.items():
        found = dict(points)
        table.append(f"| `{SPECS[name][0]}` | " + " | ".join(f"{found[c]:.1f} ms" if c in found else "" for c in columns) + " |")
    insert(PAGE, "methods", "\n".join([IMAGE, "", *table]))


def main(names: list[str]) -> None:
    whole = random_model("8b")
    makers = {}
    for name in names or SPECS:
        spec, most, indexed = SPECS[name]
        for context in CONTEXTS:
            for depth in DEPTHS:
                config = dataclasses.replace(whole.config, layers=depth)
                model = whole.replace(config=config, params=whole.params | {"layers": whole.params["layers"][:depth]})
                case = (sejax.method(spec), ROWS, context, functools.partial(held, most, context), indexed)
                makers[name, context, depth] = functools.partial(stepper, model, *case)
    taken: dict[tuple[str, int], list[float]] = {}
    for (name, context, _), start in compiled(makers).items():
        try:
            if isinstance(start, Exception):
                raise start
            taken.setdefault((name, context), []).append(step_seconds(start(), 16, 3))
        except Exception as error:  # one method must not cost the others
            print(f"{name} {context}: FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
        gc.collect()
        if len(both := taken.get((name, context), [])) == len(DEPTHS):
            each = (both[1] - both[0]) / (DEPTHS[1] - DEPTHS[0])
            seconds = both[1] + (LAYERS - DEPTHS[1]) * each
            record("methods", f"methods/{name}/b{ROWS}_t{context // 1024}k", seconds * 1e3, "ms", None, None)


if __name__ == "__main__":
    if sys.argv[1:] != ["draw"]:
        main(sys.argv[1:])
    draw()
