"""Reader of the GGUF container: metadata and dequantised tensors. The `gguf` package knows the quantised formats; its own
reader spends most of a small model's loading time on one memory map per vocabulary entry.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
    """shape: slowest axis first (the file's order reversed); offset in bytes from the file's start."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int


class Reader:
    """fields: metadata by key, as Python values; tensors: by name. ValueError names a file that is damaged or foreign."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._at = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError):
            raise ValueError(f"{path}: the header is damaged or incomplete; download the file again") from None

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32 (a fresh array, or a view of the file where it is stored so)."""
        tensor = self.tensors[name]
        items, size = gguf.GGML_QUANT_SIZES[tensor.type]
        nbytes = math.prod(tensor.shape) // items * size
        if tensor.offset + nbytes > len(self._data):
            raise ValueError(f"{self.path}: the file ends inside tensor {name!r}; download it again")
        raw = np.frombuffer(self._data, np.uint8, nbytes, tensor.offset)
        if tensor.type == gguf.GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        if tensor.type == gguf.GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
        # few long rows: the package works through 16 rows at a time
        rows = raw.reshape(math.gcd(math.prod(tensor.shape) // items, 256), -1)
        try:
            return gguf.quants.dequantize(rows, tensor.type).reshape(tensor.shape)
        except NotImplementedError:
            raise ValueError(f"{self.path}: tensor {name!r} is stored as {tensor.type.name}, which cannot be dequantised") from None

    def _parse(self) -> None:
        if self._take("4s") != b"GGUF" or self._take("I") not in (2, 3):
            raise ValueError(f"{self.path}: not a GGUF file of version 2 or 3")
        count, pairs = self._take("Q"), self._take("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            self.fields[key] = self._value(self._take("I"))
        found = {}
        for _ in range(count):
            name = self._string()
            shape = tuple(self._take("Q") for _ in range(self._take("I")))[::-1]
            kind, offset = self._take("I"), self._take("Q")
            if kind not in gguf.GGMLQuantizationType:
                raise ValueError(f"{self.path}: tensor {name!r} has the unknown type {kind}; a newer gguf package may know it")
            found[name] = Tensor(shape, gguf.GGMLQuantizationType(kind), offset)
        align = self.fields.get("general.alignment", 32)
        start = -(-self._at // align) * align
        self.tensors = {name: t._replace(offset=start + t.offset) for name, t in found.items()}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])
        inner, count = self._take("I"), self._take("Q")
        if inner in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[inner]}", self._data, self._at)
            self._at += struct.calcsize(f"<{count}{_SCALARS[inner]}")
            return list(values)
        return [self._value(inner) for _ in range(count)]

    def _string(self) -> str:
        size = self._take("Q")
        text = self._data[self._at : self._at + size]
        if len(text) < size:
            raise struct.error
        self._at += size
        return text.decode("utf-8")

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value
