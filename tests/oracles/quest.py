"""Pages by the upper bound of their logits, the last page always (METHODS 0 and 6.1)."""

import numpy as np

from tests.oracles.transformer import Layer, New, softmax


def chosen(bounds: list[float], count: int, top_p: float = 1.0, dim: int = 1) -> list[int]:
    """The `count` best pages, the last one among them, lowest index on ties; fewer where top_p of the others' weight is enough."""
    others = sorted(range(len(bounds) - 1), key=lambda i: (-bounds[i], i))
    weight = softmax(np.array([bounds[i] for i in others]) / np.sqrt(dim)) if others else np.zeros(0)
    needed = [i for i, before in zip(others, np.cumsum(weight) - weight, strict=True) if top_p == 1 or before < top_p]
    return sorted(needed[: count - 1]) + [len(bounds) - 1]


class Oracle(Layer):
    budget: int
    page: int
    top_p: float

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
            pages = chosen(bounds[h], self.budget // self.page, self.top_p, new.q.shape[-1])
            read = [p for i in pages for p in self.kept[h][i * self.page : (i + 1) * self.page]]
            out.append(self.output(h, new.q[0, h], int(new.pos[0]), read))
        return np.stack(out)[None]
