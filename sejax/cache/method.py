"""Putting a Method together from its three parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from sejax.cache.compose import Layer, compose
from sejax.cache.retention import Retention
from sejax.cache.selection import Selection
from sejax.cache.storage import Storage
from sejax.types import Array, AttentionView, LayerMethod, LayerSpec, Method, Passes, Rows, Seen

Attend = Callable[[Array, tuple[AttentionView, ...], Rows], Seen]


class Reading(NamedTuple):
    """How a prompt's queries read what there is to read: attend(spec, page) -> Hooks.attend; core: the method without it."""

    attend: Callable[[LayerSpec, int], Attend]
    core: Method


class Parts(NamedTuple):
    """What a method is made of, so that two can be combined.

    traits: what others may refuse it by ("retention", "selection", and narrower ones); refuses: (trait, sentence) pairs, the
    sentence reading "reason; use something". A method that writes its own layers has traits, but no parts to combine.
    kind: the layout of a layer's rows, called like Layer, where it is not the usual one; in_place: it prefills into the decode
    state, and seals there after the last layer; joint, passes: see Method; reading: how its prompts are read, where not as a whole.
    """

    storage: Storage
    retention: Callable[[LayerSpec], Retention] | None = None
    selection: Callable[[LayerSpec], Selection | None] | None = None
    traits: frozenset[str] = frozenset()
    refuses: tuple[tuple[str, str], ...] = ()
    kind: Callable[..., Layer] | None = None
    in_place: bool = False
    joint: Callable[..., Any] | None = None
    passes: Passes | None = None
    reading: Reading | None = None


def composed(
    name: str,
    arguments: Mapping[str, Hashable],
    storage: Storage,
    retention: Callable[[LayerSpec], Retention] | None = None,
    selection: Callable[[LayerSpec], Selection | None] | None = None,
    refuses: tuple[tuple[str, str], ...] = (),
    kind: Callable[..., Layer] | None = None,
    in_place: bool = False,
    joint: Callable[..., Any] | None = None,
    passes: Passes | None = None,
    fit: Callable[[Any], Method] | None = None,
) -> Method:
    """A Method whose layers are compose(retention(spec), selection(spec), storage).

    arguments: every hyper-parameter by name, in signature order; with the name they are the fingerprint. refuses, kind, in_place,
    joint, passes: see Parts; fit: see Method.
    """

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        return compose(spec, storage, retention(spec) if retention else None, selection(spec) if selection else None, kind)

    order = "layer" if retention and not in_place else storage.order
    traits = frozenset({"retention"} if retention else ()) | frozenset({"selection"} if selection else ())
    parts = Parts(storage, retention, selection, traits, refuses, kind, in_place, joint, passes)
    growing = retention is None or in_place
    return Method(name, tuple(arguments.items()), layer, order, growing, parts, joint, passes, fit)


def read_by(
    attend: Callable[[LayerSpec, int], Attend],
    core: Method,
    name: str,
    arguments: Mapping[str, Hashable],
    fit: Callable[[Any], Method] | None = None,
) -> Method:
    """`core`, any method, whose prompts attend by `attend` (see Reading); its decode steps, seals and replays stay as they are."""

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        inner = core.layer(spec, aux)
        return inner._replace(prefill=inner.prefill._replace(attend=attend(spec, inner.page)))

    parts = core.parts._replace(traits=core.parts.traits | {"reading"}, reading=Reading(attend, core))
    return dataclasses.replace(core, name=name, arguments=tuple(arguments.items()), layer=layer, parts=parts, fit=fit)


def combine(first: Method, second: Method) -> Method:
    """One method from two that decide different things: which tokens stay, which of them a step reads, how a prompt is read.

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
    for trait, what in (("retention", "which tokens stay"), ("selection", "which tokens are read"), ("reading", "how a prompt is read")):
        if trait in mine.traits & other.traits:
            raise ValueError(f"{first.name} with {second.name}: both decide {what}; use one of them")
    arguments = {f"{m.name}.{key}": value for m in (first, second) for key, value in m.arguments}
    fit = (lambda model: combine(first.fitted(model), second.fitted(model))) if first.fit or second.fit else None
    reading = mine.reading or other.reading
    if reading:
        cores = [m.parts.reading.core if m.parts.reading else m for m in (first, second)]
        return read_by(reading.attend, combine(*cores), f"{first.name}+{second.name}", arguments, fit)
    if not all(parts.retention or parts.selection for parts in (mine, other)):
        raise ValueError(f"{first.name} with {second.name}: one of them writes its layers as a whole; use it alone")
    keeps, picks = (mine, other) if mine.retention else (other, mine)
    rules = (picks.storage, keeps.retention, picks.selection, mine.refuses + other.refuses)
    rules += (keeps.kind, keeps.in_place, keeps.joint, keeps.passes)
    return composed(f"{first.name}+{second.name}", arguments, *rules, fit)


def either(budget: int | None, ratio: float | None, default: int) -> tuple[int | None, float | None]:
    """Exactly one of budget and ratio: `default` rows where neither is given."""
    check(budget is None or ratio is None, f"budget={budget} and ratio={ratio} are both given; give one of them")
    check(ratio is None or 0 < ratio <= 1, f"ratio={ratio} must lie in (0, 1]: the fraction of the tokens that is kept")
    check(budget is None or budget >= 1, f"budget={budget} must be at least 1 token")
    return (default if budget is None and ratio is None else budget), ratio


def check(condition: bool, sentence: str) -> None:
    """Raise ValueError(sentence) unless the condition holds: hyper-parameters are checked where they are named."""
    if not condition:
        raise ValueError(sentence)
