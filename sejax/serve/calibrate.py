"""`sejax calibrate`: what a method must know of a model, measured on texts and written as JSON. It knows no method."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sejax import functional, methods
from sejax.models import Model
from sejax.models.loading import load
from sejax.types import LayerSpec, Qkv


def calibrate(args: Any) -> None:
    """Measure, write args.output, say what was found."""
    measure = methods.calibration(args.name, **options(args.options))  # before the model: a typo should not cost a download
    output = Path(args.output)
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: its folder does not exist; make it first.")
    dtype = ("float32" if jax.default_backend() == "cpu" else "bfloat16") if args.dtype == "auto" else args.dtype
    loaded = load(args.model, dtype, progress=sys.stderr.isatty())
    found = {"model": args.model, "config": loaded.config.digest, **measure(Trace(loaded), pieces(loaded, args.texts, args.length))}
    output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{output}: " + ", ".join(f"{key} {value}" for key, value in found.items() if len(str(value)) < 80))


def options(words: Sequence[str]) -> dict[str, str]:
    """["--key", "value", "--other=value"] by key."""
    found, rest = {}, list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not key.startswith("--") or not (equals or rest):
            raise ValueError(f"{word!r} is not an option with a value: options read --key value.")
        found[key[2:].replace("-", "_")] = value if equals else rest.pop(0)
    return found


class Trace:
    """ids -> (LayerSpec, Qkv [1,T,...]) of each layer in turn; tokenizer: the model's."""

    def __init__(self, loaded: Model):
        self.model, self.tokenizer = loaded, loaded.tokenizer

    def __call__(self, ids: Sequence[int]) -> Iterator[tuple[LayerSpec, Qkv]]:
        return functional.trace(self.model, jnp.asarray(ids, jnp.int32)[None])


def pieces(loaded: Model, files: Sequence[str], length: int) -> list[list[int]]:
    """Token ids of the texts, cut to `length`; without files, of what the methods' own documentation says."""
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.config.family}: the model has no tokenizer, texts cannot be read with it.")
    if loaded.config.max_position < length:
        raise ValueError(f"--length {length} is longer than the {loaded.config.max_position} tokens the model was made for.")
    texts = [Path(file).read_text(encoding="utf-8", errors="replace") for file in files] or [
        "\n\n".join(map(documentation, methods.names()))
    ]
    encoded = [loaded.tokenizer.encode(text, bos=True) for text in texts]
    return [ids[at : at + length] for ids in encoded for at in range(0, len(ids), length)]


def documentation(name: str) -> str:
    told = methods.describe(name)
    parts = [told[key] for key in ("summary", "text", "differs", "keeps")]
    return "\n\n".join([*parts, *(f"{key}: {text}" for key, text in told["args"].items())])
