"""Importance against redundancy (METHODS 0 and 4.7)."""

from typing import Any

import numpy as np

from tests.oracles.snapkv import pooled
from tests.oracles.transformer import Evicting, New, softmax


def importance(queries: np.ndarray, keys: np.ndarray, kernel: int) -> np.ndarray:
    """queries [W,G,D]; keys [C,D] before the window."""
    logits = (queries @ keys.T / np.sqrt(keys.shape[-1])).max(1)
    return pooled(softmax(logits).mean(0), kernel, "max")


def masked_similarity(keys: np.ndarray, threshold: float, zero_column0: bool) -> np.ndarray:
    unit = keys / (np.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8)
    like = unit @ unit.T
    np.fill_diagonal(like, 0)
    for row in like:
        found = np.flatnonzero(row > threshold)
        if len(found):
            row[found[-1]] = 0
        elif zero_column0:
            row[0] = 0
    return like


class Oracle(Evicting):
    window: int

    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        super().__init__(index, layers, heads, **arguments)
        self.slack, self.available = self.period, 0

    def seal(self, new: New) -> None:
        self.available = min(self.window, len(new.pos))
        super().seal(new)

    def trim(self, new: New) -> None:
        self.available = min(self.window, self.available + 1)
        if self.slack:
            self.evict(self.available, self.rows + self.slack)

    def score(self, head: int, window: int) -> np.ndarray:
        keys = np.stack([self.k[p][head] for p in self.kept[head]])
        queries = np.stack([self.q[p][head] for p in sorted(self.q)[-window:]])
        past = len(keys) - window
        redundant = softmax(masked_similarity(keys, self.threshold, self.zero_column0).mean(0))
        score = np.full(len(keys), np.inf)
        if past:
            score[:past] = self.mix * importance(queries, keys[:past], self.kernel) - (1 - self.mix) * redundant[:past]
        return score
