"""Putting a Method together from its three parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from sejax.cache.compose import compose
from sejax.cache.retention import Retention
from sejax.cache.selection import Selection
from sejax.cache.storage import Storage
from sejax.types import LayerMethod, LayerSpec, Method


def composed(
    name: str,
    arguments: Mapping[str, Hashable],
    storage: Storage,
    retention: Callable[[LayerSpec], Retention] | None = None,
    selection: Callable[[LayerSpec], Selection | None] | None = None,
) -> Method:
    """A Method whose layers are compose(retention(spec), selection(spec), storage).

    arguments: every hyper-parameter by name, in signature order; with the name they are the fingerprint.
    """

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        return compose(spec, storage, retention(spec) if retention else None, selection(spec) if selection else None)

    order = "layer" if retention else storage.order
    return Method(name, tuple(arguments.items()), layer, order, growing=retention is None)


def check(condition: bool, sentence: str) -> None:
    """Raise ValueError(sentence) unless the condition holds: hyper-parameters are checked where they are named."""
    if not condition:
        raise ValueError(sentence)
