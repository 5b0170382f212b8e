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
        self.place = (self.budget, self.window, layers, index, self.beta)
        counts = [official(total, *self.place) for total in range(1000)]
        self.budget = max(counts) if self.schedule == "official" else counts[-1]

    def quota(self, total: int) -> int:
        return official(total, *self.place) if self.schedule == "official" else self.budget
