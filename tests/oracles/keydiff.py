"""Keys unlike the mean direction (METHODS 0 and 4.10)."""

import numpy as np

from tests.oracles.transformer import Evicting


def unlike(keys: np.ndarray) -> np.ndarray:
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(0)
    return -unit @ anchor / np.linalg.norm(anchor)


def by_block(keys: np.ndarray, budget: int, block: int) -> list[int]:
    kept = list(range(min(budget, len(keys))))
    for first in range(budget, len(keys), block):
        seen = kept + list(range(first, min(first + block, len(keys))))
        best = np.argsort(-unlike(keys[seen]), kind="stable")[:budget]
        kept = sorted(seen[i] for i in best)
    return kept


class Oracle(Evicting):
    def score(self, head: int, window: int) -> np.ndarray:
        keys = np.stack([self.k[p][head] for p in self.kept[head]])
        if self.block is None:
            return unlike(keys)
        return np.isin(np.arange(len(keys)), by_block(keys, self.budget, self.block)).astype(float)
