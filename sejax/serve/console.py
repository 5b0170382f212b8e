"""What the commands do at a terminal: an engine from flags, streamed answers, a conversation, the table of methods."""

from __future__ import annotations

import json
import logging
import queue
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from sejax import methods
from sejax.config import settings
from sejax.models.loading import load
from sejax.serve import chat as templates
from sejax.serve.engine import Engine
from sejax.serve.request import Delta, EngineLike, InvalidRequest, Prompt, Sampling, Usage

log = logging.getLogger("sejax")

DEFAULT_LEN = 8192
"""Longest context unless one is asked for: models allow far more than most machines have memory for."""

HELP = "/clear starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def engine_of(args: Any, rows: int | None = None) -> Engine:
    """The engine that the flags describe, not started. rows: of a command that knows how many answers run at once.

    Raises ValueError for a method, model or size that cannot be.
    """
    method = methods.method(args.method) if args.method else methods.full()  # before the model: a typo should not cost a download
    keep_programs()
    dtype = ("float32" if jax.default_backend() == "cpu" else "bfloat16") if args.dtype == "auto" else args.dtype
    model = load(args.model, dtype, progress=sys.stderr.isatty())
    longest = model.config.max_position
    if (args.max_len or 1) > longest:
        raise ValueError(f"--max-len {args.max_len} is longer than the {longest} tokens {args.model} was made for; give at most that.")
    sizes = {"rows": args.rows or rows, "slots": args.slots or (None if args.rows else rows), "kv_tokens": args.kv_tokens}
    given = sizes | {"max_queue": getattr(args, "max_queue", None)}
    names = getattr(args, "served_model_name", None) or [args.model if not Path(args.model).exists() else Path(args.model).stem]
    chosen = {key: value for key, value in given.items() if value is not None}
    return Engine(model, method, max_len=args.max_len or min(longest, DEFAULT_LEN), name=names[0], progress=compiling(), **chosen)


def keep_programs() -> None:
    """Compiled programs outlive the process: the next start takes seconds."""
    jax.config.update("jax_compilation_cache_dir", str(settings().compile_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def compiling() -> Callable[[int, int], None]:
    """Progress for Engine(progress=...): a bar on a terminal, elsewhere a line in the log now and then."""
    if not sys.stderr.isatty():
        return lambda done, total: log.info("compiled %d of %d programs", done, total) if done % 10 == 0 or done == total else None
    bar = Progress(TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("")

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return show


class Answer:
    """One request in flight: iterate over its pieces; times in seconds since it was submitted."""

    def __init__(self, engine: EngineLike, prompt: Prompt, sampling: Sampling):
        self.engine, self.text, self.ids = engine, "", ()
        self.first: float | None = None
        self.total = 0.0
        self.last: Delta | None = None
        self._pieces: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._began = time.perf_counter()
        self.id = engine.submit(prompt, sampling, self._pieces.put)

    def __iter__(self) -> Iterator[str]:
        while self.last is None:
            try:
                delta = self._pieces.get(timeout=1.0)
            except queue.Empty:
                if self.engine.failure:
                    raise RuntimeError(f"The engine stopped: {self.engine.failure}") from None
                continue
            self.total = time.perf_counter() - self._began
            if delta.ids and self.first is None:
                self.first = self.total
            self.text += delta.text
            self.ids += delta.ids
            self.last = delta if delta.finish else None
            if delta.finish == "error":
                raise RuntimeError(delta.error or "The engine failed.")
            yield delta.text

    @property
    def usage(self) -> Usage:
        return (self.last and self.last.usage) or Usage(0, 0, len(self.ids))


class Speed(NamedTuple):
    """first: seconds to the first token; rate: tokens a second after it, None for fewer than two."""

    first: float
    rate: float | None


def speed(answer: Answer) -> Speed:
    first = answer.total if answer.first is None else answer.first
    rest = answer.total - first
    return Speed(first, (len(answer.ids) - 1) / rest if len(answer.ids) > 1 and rest > 0 else None)


def sampling_of(args: Any) -> Sampling:
    return Sampling(args.max_tokens, args.temperature, args.top_k, args.top_p, args.min_p, args.seed, tuple(args.stop))


def generate(engine: Any, args: Any) -> None:
    """All prompts run together; answers are printed in the order of the prompts, each as it comes."""
    sampling, tokenizer = sampling_of(args), engine.model.tokenizer
    texts = [sys.stdin.read() if text == "-" else text for text in args.prompts]
    if args.chat:
        texts = [templates.render(tokenizer, [{"role": "user", "content": t}], add_generation_prompt=True) for t in texts]
    elif getattr(tokenizer, "add_bos", False):
        bos = tokenizer.decode([tokenizer.bos_id])
        texts = [text if text.startswith(bos) else bos + text for text in texts]
    prompts = [Prompt(tuple(tokenizer.encode(text)), text) for text in texts]
    if not all(prompt.ids for prompt in prompts):
        raise InvalidRequest("A prompt must have at least one token; the given one is empty.", "prompt")
    engine.start()
    try:
        answers = [Answer(engine, prompt, sampling) for prompt in prompts]
        for number, answer in enumerate(answers, 1):
            if args.json:
                print(json.dumps(_record(answer), ensure_ascii=False), flush=True)
                continue
            if len(answers) > 1:
                print(f"--- {number}")
            for piece in answer:
                print(piece, end="", flush=True)
            print()
    finally:
        engine.close(0.0)


def _record(answer: Answer) -> dict[str, Any]:
    for _ in answer:
        pass
    times = speed(answer)
    seconds = {"first_token": times.first, "total": answer.total, "tokens_per_second": times.rate}
    finish = answer.last.finish if answer.last else None
    return {"text": answer.text, "ids": answer.ids, "finish": finish, "usage": answer.usage._asdict(), "seconds": seconds}


def chat(engine: Any, args: Any) -> None:
    """A conversation on standard input and output, until its end."""
    console = Console(highlight=False)
    sampling = sampling_of(args)
    engine.start()
    console.print(f"[bold]{escape(engine.name)}[/] with [bold]{escape(str(engine.method))}[/], {engine.max_len:,} tokens. {HELP}")
    start = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(start)
    try:
        while (said := _read(console)) is not None:
            if said == "/clear":
                messages = list(start)
                console.print("[dim]A new conversation.[/]")
            elif said.startswith("/"):
                console.print(HELP)
            elif said:
                messages = _turn(engine, console, [*messages, {"role": "user", "content": said}], sampling)
    finally:
        engine.close(0.0)


def _read(console: Console) -> str | None:
    """The next line; None at the end."""
    try:
        said = console.input("[bold cyan]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if said in ("/exit", "/quit") else said


def _turn(engine: EngineLike, console: Console, messages: list[dict[str, str]], sampling: Sampling) -> list[dict[str, str]]:
    """One answer, streamed; returns the conversation with it, or without the question if it could not be asked."""
    tokenizer = engine.model.tokenizer
    try:
        text = templates.render(tokenizer, messages, add_generation_prompt=True)
        answer = Answer(engine, Prompt(templates.encode(tokenizer, text, engine.marks()), text), sampling)
    except InvalidRequest as error:
        console.print(f"[red]{escape(str(error))}[/] /clear starts anew.")
        return messages[:-1]
    try:
        for piece in answer:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        engine.cancel(answer.id)
        for piece in answer:  # what was under way; the last piece tells the counts
            print(piece, end="", flush=True)
    print()
    console.print(f"[dim]{turn_line(answer)}[/]")
    return [*messages, {"role": "assistant", "content": answer.text}]


def turn_line(answer: Answer) -> str:
    """Kept and logical tokens, tokens reused, speed, time to first token."""
    usage, times = answer.usage, speed(answer)
    logical = usage.prompt + usage.completion
    rate = f"{times.rate:.1f} tokens/s" if times.rate else "one token"
    kept = f"{usage.kept:,.0f} of {logical:,} tokens kept, {usage.cached:,} of {usage.prompt:,} reused"
    ended = {"length": " | cut at the length limit", "cancelled": " | stopped"}.get((answer.last and answer.last.finish) or "", "")
    return f"{kept} | first token {times.first:.2f} s | {rate}{ended}"


def show_methods(name: str | None = None) -> None:
    """The table of methods, or everything about one."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    if name is not None:
        return _show_method(console, methods.describe(name))
    table = Table("name", "family", "hyper-parameters", "keeps", "paper", title="KV-cache methods", show_lines=True)
    for told in map(methods.describe, methods.names()):
        shown = ", ".join(f"{key}={_default(value)}" for key, value in told["defaults"].items())
        table.add_row(*map(escape, (told["name"], told["family"], shown, told["keeps"], told["paper"])))
    console.print(table)
    console.print("Use: --method NAME or --method NAME:key=value,key=value. More on one: sejax methods NAME.")


def _show_method(console: Console, told: dict[str, Any]) -> None:
    console.print(f"[bold]{told['name']}[/]: {escape(told['summary'])}")
    if told["text"]:
        console.print(f"\n{escape(told['text'])}")
    console.print()
    for section in ("family", "paper", "differs", "keeps"):
        if told[section]:
            console.print(f"[bold]{section.capitalize()}[/]: {escape(told[section])}")
    table = Table("hyper-parameter", "default", "meaning", box=None, pad_edge=False)
    for key, value in told["defaults"].items():
        table.add_row(*map(escape, (key, _default(value), told["args"].get(key, ""))))
    console.print()
    console.print(table)


def _default(value: Any) -> str:
    if isinstance(value, type):  # inspect's mark for a parameter without one
        return "(must be given)"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
