"""What a smaller budget costs: `python -m bench.quality` runs every method on texts with a fact to find, and writes docs/quality.md's
figure and table (`... draw`: from the last results).

One line a method and budget in bench/results/quality.jsonl: in how many texts every token of the fact is the arg-max (teacher-forced),
and how much less likely the gold answer is, in nats a token, than when everything is read. SmolLM2-135M in float32.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

import numpy as np

import sejax
from bench import forced
from bench.needles import case
from bench.plot import Panel, chart, insert
from bench.timing import RESULTS, commit

MODEL, LENGTH, PARTS, TEXTS = "smollm2-135m", 512, (16, 8, 4, 2), 4
IMAGE = "![Texts whose fact is found, and log-probability lost, against the budget](quality.svg)"
PAGE = pathlib.Path(__file__).parents[1] / "docs/quality.md"
SPECS = {
    "streamingllm": "streamingllm:recent={rest}",
    "snapkv": "snapkv:budget={n},window=16",
    "pyramidkv": "pyramidkv:budget={n}",
    "adakv": "adakv:budget={n},window=16",
    "h2o": "h2o:budget={n},period=0",
    "tova": "tova:budget={n},period=0",
    "rkv": "rkv:budget={n},period=0",
    "skipkv": "skipkv:budget={n},sinks=4,window=8,period=0",
    "expected_attention": "expected_attention:budget={n}",
    "keydiff": "keydiff:budget={n}",
    "kvzip": "kvzip:ratio={ratio}",
    "quest": "quest:budget={n}",
    "omnikv": "omnikv:budget={n}",
}
"""Defaults where the budget leaves room for them; {n} tokens kept, or read at a step."""


def measure(names: list[str], file: pathlib.Path) -> None:
    """Writes the file anew after every text."""
    model = sejax.load(MODEL, dtype="float32")
    assert model.tokenizer is not None
    numbers = [(name, part, dict(n=LENGTH // part, rest=LENGTH // part - 4, ratio=1 / part)) for name in names for part in PARTS]
    methods = [sejax.methods.full()] + [sejax.method(SPECS[name].format(**given)) for name, _, given in numbers]
    right, lost = np.zeros(len(methods)), np.zeros(len(methods))
    for seed in range(TEXTS):
        text = case(model.tokenizer, ("needle", "pairs")[seed % 2], LENGTH, 100 + seed)
        found = forced.answers(model, methods, text.context, text.tail)
        gold, fact, answer = np.asarray(text.tail), list(text.value), list(text.answer)
        right += [bool((a.best[fact] == gold[fact]).all()) for a in found]
        lost += [float((found[0].logp - a.logp)[answer].mean()) for a in found]
        same, done = {"texts": seed + 1, "tokens": LENGTH, "model": MODEL, "commit": commit()}, seed + 1
        rows = [("full", 1, right[0], lost[0])] + [(n, p, *x) for (n, p, _), *x in zip(numbers, right[1:], lost[1:], strict=True)]
        lines = [{"method": n, "part": p, "accuracy": r / done, "loss": round(x / done, 4), **same} for n, p, r, x in rows]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"text {done} of {TEXTS}", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: accuracy and loss of every method at every budget."""
    lines = [f"{rows[0]['texts']} texts of {rows[0]['tokens']} tokens.", ""]
    lines += ["| method | " + " | ".join(f"1/{part}" for part in PARTS) + " |", "|---" * (len(PARTS) + 1) + "|"]
    for name in dict.fromkeys(row["method"] for row in rows):
        of = {row["part"]: f"{row['accuracy']:.0%}, {row['loss']:+.2f}" for row in rows if row["method"] == name}
        lines.append(f"| `{name}` | " + " | ".join(of.get(part, of.get(1, "")) for part in PARTS) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> str:
    """Both figures: accuracy and loss against the budget."""
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if name != "full"]
    values = {
        key: {n: [(1 / r["part"], max(0.0, r[key])) for r in rows if r["method"] == n] for n in names} for key in ("accuracy", "loss")
    }
    budgets = {1 / part: f"1/{part}" for part in PARTS}
    top = max(1, math.ceil(max(y for points in values["loss"].values() for _, y in points)))
    right = Panel(
        "texts whose fact is found", "tokens kept or read", values["accuracy"], budgets, {x / 4: f"{x / 4:.0%}" for x in range(5)}, math.log
    )
    nats = {y * top / 4: f"{y * top / 4:g}" for y in range(5)}
    return chart([right, Panel("log-probability lost, nats a token", "tokens kept or read", values["loss"], budgets, nats, math.log)])


def main(arguments: list[str]) -> int:
    file = RESULTS / "quality.jsonl"
    if arguments[:1] != ["draw"]:
        measure(arguments or list(SPECS), file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    PAGE.with_suffix(".svg").write_text(draw(rows))
    insert(PAGE, "quality", f"{IMAGE}\n\n{table(rows)}")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
