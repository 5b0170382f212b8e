"""What an engine's programs are made for: its sizes, its layers, and the scalars of a unit of work."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from sejax.models import Model, decoder
from sejax.types import LayerMethod, LayerSpec, Method


class Sizes(NamedTuple):
    """Static sizes. slots: S, spares included; pages: N a layer (None: each slot has its whole run); rows: largest batch."""

    slots: int
    rows: int
    max_len: int
    pages: int | None
    stages: tuple[int, ...]  # token rows of each prefill stage, empty for methods that prefill in place
    chunks: tuple[int, ...]  # prefill buckets, ascending
    burst: int = 1  # decode steps of one program while nobody streams


class Job(NamedTuple):
    """Scalars of one prefill unit, i32 or bool. slot: the sequence so far (S: none); stage: the stage's slot, or `slot`."""

    stage: Any
    slot: Any
    start: Any
    count: Any
    fresh: Any  # first unit of this turn in this layer: forget what the stage (or a new sequence's slot) held
    turn: Any = None  # i32[2], in units: where the turn begins and ends


class Watched(LayerSpec):
    """A spec that notices when somebody reads its index: a pure function that never does treats layers of equal specs alike."""

    def __getattribute__(self, name: str) -> Any:
        if name == "index":
            vars(self)["asked"] = True
        return super().__getattribute__(name)

    @property
    def kind_of(self) -> tuple[Any, ...] | None:
        """All but the index; None once that was read."""
        return None if "asked" in vars(self) else tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "index")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The layers of one engine: what the program bodies close over."""

    model: Model
    method: Method
    sizes: Sizes

    @functools.cached_property
    def layers(self) -> tuple[tuple[Watched, LayerMethod], ...]:
        specs = decoder.specs(self.model.config, str(self.model.dtype), self.sizes.max_len)
        watched = [Watched(**vars(spec)) for spec in specs]
        return tuple((spec, self.method.layer(spec, None)) for spec in watched)

    def width(self, method: LayerMethod) -> int:
        """M of the layer's table."""
        return method.pages(method.run(self.sizes.max_len))

    def pool(self, method: LayerMethod) -> int:
        """N of the layer."""
        return self.sizes.pages or self.sizes.slots * self.width(method)

    def stage_table(self, method: LayerMethod) -> tuple[int, list[list[int]]]:
        """Pages of the stage pool and each stage's page ids, padded with an id out of range."""
        widths = [method.pages(rows) for rows in self.sizes.stages]
        total, table, at = sum(widths), [], 0
        for width in widths:
            table.append([*range(at, at + width), *[total] * (max(widths) - width)])
            at += width
        return total, table
