"""Putting a Method together from its three parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from sejax.cache.compose import Layer, compose
from sejax.cache.retention import Retention
from sejax.cache.selection import Selection
from sejax.cache.storage import Storage
from sejax.types import LayerMethod, LayerSpec, Method


class Parts(NamedTuple):
    """What a method is made of, so that two can be combined.

    traits: what others may refuse it by ("retention", "selection", and narrower ones); refuses: (trait, sentence) pairs, the
    sentence reading "reason; use something". A method that writes its own layers has traits, but no parts to combine.
    """

    storage: Storage
    retention: Callable[[LayerSpec], Retention] | None = None
    selection: Callable[[LayerSpec], Selection | None] | None = None
    traits: frozenset[str] = frozenset()
    refuses: tuple[tuple[str, str], ...] = ()


def composed(
    name: str,
    arguments: Mapping[str, Hashable],
    storage: Storage,
    retention: Callable[[LayerSpec], Retention] | None = None,
    selection: Callable[[LayerSpec], Selection | None] | None = None,
    refuses: tuple[tuple[str, str], ...] = (),
    kind: type[Layer] | None = None,
) -> Method:
    """A Method whose layers are compose(retention(spec), selection(spec), storage).

    arguments: every hyper-parameter by name, in signature order; with the name they are the fingerprint. refuses: see Parts.
    kind: the layout of a layer's rows, where it is not the usual one.
    """

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        return compose(spec, storage, retention(spec) if retention else None, selection(spec) if selection else None, kind)

    order = "layer" if retention else storage.order
    traits = frozenset({"retention"} if retention else ()) | frozenset({"selection"} if selection else ())
    parts = Parts(storage, retention, selection, traits, refuses)
    return Method(name, tuple(arguments.items()), layer, order, growing=retention is None, parts=parts)


def combine(first: Method, second: Method) -> Method:
    """One method from two that decide different things: which tokens stay, and which of them a step reads.

    Raises ValueError "X with Y: reason; use Z" for what does not go together.
    """
    mine, other = first.parts, second.parts
    for a, b in ((first, second), (second, first)):
        if not a.parts or not b.parts:
            raise ValueError(f"{first.name} with {second.name}: {a.name} does not say what it is made of; use it alone")
        if not a.parts.traits:  # keeps and reads everything
            return b
        for trait, sentence in a.parts.refuses:
            if trait in b.parts.traits:
                raise ValueError(f"{first.name} with {second.name}: {sentence}")
    for trait, what in (("retention", "which tokens stay"), ("selection", "which tokens are read")):
        if trait in mine.traits & other.traits:
            raise ValueError(f"{first.name} with {second.name}: both decide {what}; use one of them")
    if not all(parts.retention or parts.selection for parts in (mine, other)):
        raise ValueError(f"{first.name} with {second.name}: one of them writes its layers as a whole; use it alone")
    arguments = {f"{m.name}.{key}": value for m in (first, second) for key, value in m.arguments}
    keeps, picks = (mine, other) if mine.retention else (other, mine)
    return composed(f"{first.name}+{second.name}", arguments, picks.storage, keeps.retention, picks.selection, mine.refuses + other.refuses)


def check(condition: bool, sentence: str) -> None:
    """Raise ValueError(sentence) unless the condition holds: hyper-parameters are checked where they are named."""
    if not condition:
        raise ValueError(sentence)
