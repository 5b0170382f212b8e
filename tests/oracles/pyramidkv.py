"""SnapKV's scores, counts by layer (METHODS 0 and 4.4)."""

from typing import Any

from tests.oracles import snapkv


def official(total: int, budget: int, window: int, layers: int, layer: int, beta: int) -> int:
    past = budget - window
    if total < budget:
        return total
    if total < 2 * past:
        return budget
    least = past // beta
    most = 2 * past - least
    if most >= total - window:
        most = total - window
        least = 2 * past - most
    return window + most - layer * ((most - least) // (layers - 1))


class Oracle(snapkv.Oracle):
    sinks = 0

    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        super().__init__(index, layers, heads, **arguments)
        self.place = (self.window, layers, index, self.beta)
        if self.ratio:
            return
        counts = [official(total, self.budget, *self.place) for total in range(1000)]
        self.mean, self.budget = self.budget, max(counts) if self.schedule == "official" else counts[-1]

    def quota(self, total: int) -> int:
        return official(total, self.mean, *self.place) if self.schedule == "official" else self.rows

    @property
    def rows(self) -> int:
        if not self.ratio:
            return self.budget
        mean, length = super().rows, len(self.k)
        return official(length if self.schedule == "official" else 2 * mean, mean, *self.place) if mean > self.window else mean
