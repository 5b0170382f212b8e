"""The newest query's attention, one set for all heads (METHODS 0 and 4.6)."""

from typing import Any

import numpy as np

from tests.oracles.transformer import Evicting


class Oracle(Evicting):
    window = 1

    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        super().__init__(index, layers, heads, **arguments)
        self.slack = self.period

    def score(self, head: int, window: int) -> np.ndarray:
        newest = max(self.q)
        return self.weights(head, self.q[newest][head], newest, self.kept[head]).mean(0)

    def joined(self, scores: list[np.ndarray]) -> list[np.ndarray]:
        score = np.mean(scores, axis=0)
        if self.protect_last:
            score[-1] = np.inf
        return [score] * self.heads
