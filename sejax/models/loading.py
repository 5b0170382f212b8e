"""From a name, a directory or a file to a model."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import huggingface_hub
import jax.numpy as jnp

from . import config as configs
from . import gguf, tokenizer, weights
from .model import Model

DTYPES = ("float32", "bfloat16", "float16")
FILES = ["*.json", "*.safetensors", "*.jinja"]


def load(source: str | pathlib.Path, dtype: str = "float32", progress: bool = True) -> Model:
    """Load a model.

    source: a directory with config.json and *.safetensors, a .gguf file, a demo model's name, or a Hugging Face repo id
    (owner/name, downloaded into the hub's cache). dtype: of weights and activations: float32, bfloat16 or float16.
    progress: show a bar on a terminal. ValueError: a sentence that names the file and what is wrong in it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
    path = find(source)
    if path.is_file():
        file = gguf.File(path)
        config, text, store = file.config, file.tokenizer, file
    else:
        config = configs.read(path)
        text, store = tokenizer.read(path, config.eos_ids, config.bos_id), weights.Safetensors(path)
    if text is not None:
        config = dataclasses.replace(config, bos_id=text.bos_id, eos_ids=text.eos_ids)
    return Model(weights.load(store, config, jnp.dtype(dtype), progress), config, text)


def find(source: str | pathlib.Path) -> pathlib.Path:
    """The local directory or .gguf file that `source` names, downloaded if need be."""
    path = pathlib.Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ValueError(f"{path}: not a model; give a directory with config.json, or a .gguf file")
    from .pull import resolve, suggestion  # here, so that reading a local model needs none of the downloading code

    if (found := resolve(str(source))) is not None:
        return found
    if path.suffix != ".gguf" and re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        return _download(str(source))
    what = f"model {str(source)!r} is not a directory, a .gguf file, a demo model's name or a Hugging Face repo id"
    raise ValueError(f"{what}. {suggestion(str(source))}")


def _download(repo: str) -> pathlib.Path:
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repo, allow_patterns=FILES))
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model {repo!r} could not be downloaded from Hugging Face: {reason}") from None
