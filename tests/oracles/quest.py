"""Pages by the upper bound of their logits, the last page always (METHODS 0 and 6.1)."""

import numpy as np

from tests.oracles.transformer import Layer, New


def chosen(bounds: list[float], count: int) -> list[int]:
    """The `count` best pages, the last one among them, lowest index on ties."""
    others = sorted(range(len(bounds) - 1), key=lambda i: (-bounds[i], i))[: count - 1]
    return sorted(others) + [len(bounds) - 1]


class Oracle(Layer):
    budget: int
    page: int

    def bound(self, head: int, query: np.ndarray) -> list[float]:
        """For each page the largest over the group of sum_d max(q_d max_d, q_d min_d)."""
        held, found = self.kept[head], []
        for i in range(0, len(held), self.page):
            keys = np.stack([self.k[p][head] for p in held[i : i + self.page]])
            found.append(np.maximum(query * keys.max(0), query * keys.min(0)).sum(-1).max())
        return found

    def read(self, new: New) -> np.ndarray:
        if self.index < self.dense_layers:
            return super().read(new)
        bounds = [self.bound(h, new.q[0, h]) for h in range(self.heads)]
        if self.heads_mode == "shared":
            bounds = [list(np.max(bounds, axis=0))] * self.heads
        out = []
        for h in range(self.heads):
            pages = chosen(bounds[h], self.budget // self.page)
            read = [p for i in pages for p in self.kept[h][i * self.page : (i + 1) * self.page]]
            out.append(self.output(h, new.q[0, h], int(new.pos[0]), read))
        return np.stack(out)[None]
