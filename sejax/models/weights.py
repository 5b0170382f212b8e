"""Parameters from a checkpoint: names, shapes and dtypes checked, one layer in host memory at a time."""

from __future__ import annotations

import pathlib
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import safetensors
from rich.console import Console
from rich.progress import Progress

from . import families
from .config import Config, read_json
from .family import layer_shapes, packed, top_shapes


class Source(Protocol):
    """A checkpoint: kind 0 uses Hugging Face's tensor names, 1 GGUF's; file(name) is the file that holds a tensor, or None."""

    kind: int
    where: str

    def file(self, name: str) -> str | None: ...
    def read(self, name: str) -> np.ndarray: ...


def load(source: Source, config: Config, dtype: Any, progress: bool = False) -> dict[str, Any]:
    """The params tree of a model. Tensors the config does not name are ignored; ValueError names a missing or misshapen one."""
    family = families.by("name", config.family, source.where)
    top, inner = top_shapes(config), layer_shapes(config)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("loading", total=len(top) + config.layers * len(inner))

        def get(name: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
            stored = family.tensor(name, layer, source.kind)
            file = source.file(stored)
            if file is None:
                raise ValueError(f"{source.where}: tensor {stored!r} is missing")
            value = source.read(stored)
            if value.shape != shape:
                raise ValueError(f"{file}: tensor {stored!r} has shape {list(value.shape)}; the configuration needs {list(shape)}")
            bar.advance(task)
            return value.astype(dtype, copy=False)

        def layer(i: int) -> dict[str, Any]:
            return {n: jnp.asarray(x) for n, x in packed({n: get(n, i, s) for n, s in inner.items()}).items()}

        params: dict[str, Any] = {name: jnp.asarray(get(name, None, shape)) for name, shape in top.items()}
        params["layers"] = tuple(layer(i) for i in range(config.layers))
    return params


class Safetensors:
    """The safetensors files of a directory: sharded with an index, or single."""

    kind = 0

    def __init__(self, directory: pathlib.Path):
        self.where = str(directory)
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self._files = {name: directory / file for name, file in read_json(index)["weight_map"].items()}
            if absent := sorted({f.name for f in self._files.values() if not f.exists()}):
                raise ValueError(f"{index}: names {', '.join(absent)}, which the directory lacks; download the model again")
        else:
            files = sorted(directory.glob("*.safetensors"))
            if not files:
                raise ValueError(f"{directory}: no *.safetensors file; other weight formats (.bin, .pth) are not read")
            self._files = {name: file for file in files for name in _names(file)}

    def file(self, name: str) -> str | None:
        found = self._files.get(name)
        return None if found is None else str(found)

    def read(self, name: str) -> np.ndarray:
        with _open(self._files[name]) as handle:
            try:
                kind = handle.get_slice(name).get_dtype()
            except safetensors.SafetensorError:
                raise ValueError(f"{self._files[name]}: tensor {name!r} is missing, although the index names it here") from None
            if kind not in ("F32", "F16", "BF16"):
                raise ValueError(f"{self._files[name]}: tensor {name!r} is stored as {kind}; supported are F32, F16 and BF16")
            return handle.get_tensor(name)


def _open(file: pathlib.Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file ({error}); download it again") from None


def _names(file: pathlib.Path) -> list[str]:
    with _open(file) as handle:
        return list(handle.keys())
