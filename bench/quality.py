"""What a smaller budget costs: `python -m bench.quality [METHOD ...]` runs every method on texts with a fact to find, and writes
docs/quality.md's figure and tables (`... draw`: from the last results; `... texts=12`: on more texts).

One line a method and budget in bench/results/quality.jsonl: in which texts every token of the fact is the arg-max (teacher-forced),
and the gold answer's mean log-probability, nats a token. The file is written after each method, and a later run adds only what is
missing; for a fresh measurement delete it. SmolLM2-135M in float32; on two CPU cores about half an hour.
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
from bench.needles import Case, case
from bench.plot import Panel, chart, insert
from bench.timing import RESULTS, commit
from sejax.types import Qkv

MODEL, LENGTH, PARTS, TEXTS = "smollm2-135m", 512, (2, 4, 8, 16), 8
IMAGE = "![Texts whose fact is found, and log-probability lost, against the budget](quality.svg)"
PAGE = pathlib.Path(__file__).parents[1] / "docs/quality.md"
BUDGETS = {
    "streamingllm": "streamingllm:recent={rest}",
    "snapkv": "snapkv:budget={n},window=16",
    "adakv": "adakv:budget={n},window=16",
    "h2o": "h2o:budget={n},period=0",
    "tova": "tova:budget={n},period=0",
    "rkv": "rkv:budget={n},period=0",
    "skipkv": "skipkv:budget={n},sinks=4,window=8,period=0",
    "expected_attention": "expected_attention:budget={n}",
    "keydiff": "keydiff:budget={n}",
    "kvzip": "kvzip:ratio={ratio}",
    "quest": "quest:budget={n}",
    "quest, 32-token pages": "quest:budget={n},page=32",
    "omnikv": "omnikv:budget={n}",
    "retroinfer": "retroinfer:ratio={near},estimate={far},recent=8,threshold=256",
    "rkv + quest": "rkv:budget={twice},period=0 + quest:budget={n}",
    "pyramidkv": "pyramidkv:budget={n}",
}
"""Defaults where the budget leaves room for them; {n} tokens kept, or read at a step."""
PROMPTS = {"flashprefill": "flashprefill:alpha={alpha},block=16,tile=48,sinks=1,window=1,last=1,shortest=0"}
"""No budget, but a threshold; blocks and tiles small enough for texts of this length."""
ALPHAS = (0.05, 0.2, 0.8)
Found = dict[str, dict[float, tuple[float, float]]]
"""method -> setting -> (part of the texts whose fact is found, nats a token lost against everything read)."""


def numbers(part: int) -> dict[str, float]:
    """What the patterns name, for a budget of LENGTH / part tokens.

    near, far: shares of retroinfer's clusters, of 16 tokens in the mean, read token by token and as one token each; beside them
    4 sinks and 8 recent tokens are read.
    """
    n, clusters = LENGTH // part, LENGTH // 16
    near = max(1, (n - 12) // 17)
    far = min(n - 12 - 16 * near, clusters - near)
    return dict(n=n, rest=n - 4, twice=2 * n, ratio=1 / part, near=near / clusters, far=far / clusters)


def settings(name: str) -> dict[float, str]:
    """A method's specs, by the part of the text kept or read (in PROMPTS: by alpha)."""
    if name in PROMPTS:
        return {alpha: PROMPTS[name].format(alpha=alpha) for alpha in ALPHAS}
    return {1 / part: BUDGETS[name].format(**numbers(part)) for part in PARTS} if name in BUDGETS else {1.0: name}


def text_of(model: sejax.Model, seed: int) -> Case:
    assert model.tokenizer is not None
    return case(model.tokenizer, ("needle", "pairs")[seed % 2], LENGTH, 100 + seed)


def measure(names: list[str], count: int, file: pathlib.Path) -> None:
    """Adds the texts up to `count` that the file's lines of these methods do not have yet."""
    model = sejax.load(MODEL, dtype="float32")
    texts: dict[int, tuple[Case, list[tuple[Qkv, Any]]]] = {}
    for name in names:
        specs, rows = settings(name), read(file)
        known = {row["at"]: row for row in rows if row["method"] == name}
        mine = [known.get(at, {"method": name, "at": at, "found": [], "logp": []}) for at in specs]
        missing = range(len(mine[0]["found"]), count)
        for seed in missing:
            if seed not in texts:
                text = text_of(model, seed)
                texts[seed] = text, list(forced.passed(model, text.context))
            text, dense = texts[seed]
            gold, fact, answer = np.asarray(text.tail), list(text.value), list(text.answer)
            answers = forced.answers(model, [sejax.method(spec) for spec in specs.values()], text.context, text.tail, dense)
            for row, found in zip(mine, answers, strict=True):
                row["found"].append(bool((found.best[fact] == gold[fact]).all()))
                row["logp"].append(round(float(found.logp[answer].mean()), 4))
        if missing:
            mine = [row | {"tokens": LENGTH, "model": MODEL, "commit": commit()} for row in mine]
            file.write_text("".join(json.dumps(row) + "\n" for row in [r for r in rows if r["method"] != name] + mine))
            print(f"{name}: {' '.join(f'{np.mean(row["found"]):.0%}' for row in mine)}", flush=True)
        forced.clear()


def read(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def results(rows: list[dict[str, Any]]) -> Found:
    whole = next(row["logp"] for row in rows if row["method"] == "full")
    found: Found = {}
    for row in rows:
        lost = float(np.mean(np.subtract(whole[: len(row["logp"])], row["logp"][: len(whole)])))
        found.setdefault(row["method"], {})[row["at"]] = float(np.mean(row["found"])), lost
    return found


def table(first: str, columns: dict[float, str], names: list[str], found: Found) -> str:
    """Markdown: accuracy and loss of each method at each setting."""
    lines = [f"| {first} | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = [f"{right:.0%}, {lost:+.2f}" for right, lost in (found[name][at] for at in columns)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(names: list[str], found: Found) -> str:
    """Both figures: accuracy and loss against the budget."""
    budgets = {1 / part: f"1/{part}" for part in PARTS}  # from all to little: towards the right lines part, and are named there
    right, lost = ({name: [(at, max(0.0, found[name][at][i])) for at in budgets] for name in names} for i in (0, 1))
    halves = math.ceil(2 * max(y for points in lost.values() for _, y in points))
    shares, nats = {x / 4: f"{x / 4:.0%}" for x in range(5)}, {y / 2: f"{y / 2:g}" for y in range(max(1, halves) + 1)}
    under = "part of the text kept or read"
    panels = ("texts whose fact is found", right, shares), ("log-probability lost, nats a token", lost, nats)
    return chart([Panel(title, under, series, budgets, ys, math.log) for title, series, ys in panels])


def report(rows: list[dict[str, Any]]) -> str:
    """Writes the figure, and figure and tables into the page; returns the tables."""
    found = results(rows)
    names = [name for name in BUDGETS if name in found]
    count = " to ".join(map(str, sorted({len(row["found"]) for row in rows})))
    tables = [f"{count} texts of {LENGTH} tokens, {MODEL}; with everything kept and read {found['full'][1][0]:.0%} of the facts are found."]
    tables.append(table("method", {1 / part: f"1/{part}" for part in PARTS}, names, found))
    prompts = [name for name in PROMPTS if name in found]
    if prompts:
        tables.append("Sparse prefill has no budget of tokens, but a threshold, and is therefore not in the figure:")
        tables.append(table("method", {alpha: f"alpha={alpha}" for alpha in ALPHAS}, prompts, found))
    PAGE.with_suffix(".svg").write_text(draw(names, found))
    insert(PAGE, "quality", "\n\n".join([IMAGE, *tables]))
    return "\n\n".join(tables)


def main(arguments: list[str]) -> int:
    file, count = RESULTS / "quality.jsonl", TEXTS
    if arguments[:1] != ["draw"]:
        count = next((int(a.removeprefix("texts=")) for a in arguments if a.startswith("texts=")), TEXTS)
        names = [a for a in arguments if not a.startswith("texts=")]
        measure(names or ["full", *PROMPTS, *BUDGETS], count, file)
    print(report(read(file)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
