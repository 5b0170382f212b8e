"""SnapKV's scores, the layer's budget dealt to heads (METHODS 0 and 4.5)."""

import numpy as np

from tests.oracles.snapkv import pooled
from tests.oracles.transformer import Evicting


def counts(scores: list[np.ndarray], base: int) -> list[int]:
    """How many of the H * base best over all heads lie in each, lowest head and index first on ties."""
    flat = sorted(((-s, h, i) for h, row in enumerate(scores) for i, s in enumerate(row)))[: len(scores) * base]
    return [sum(h == head for _, h, _ in flat) for head in range(len(scores))]


class Oracle(Evicting):
    def evict(self, window: int, limit: int | None) -> None:
        """All heads decide when one is over: over the mean at first, later when its last share and the slack are full."""
        last = getattr(self, "last", [self.rows] * self.heads)
        over = [len(held) > self.rows if limit is None else len(held) >= last[h] + self.slack for h, held in enumerate(self.kept)]
        if not any(over):
            return
        base, scores = max(self.rows - self.window, 0), [self.score(h, window) for h in range(self.heads)]
        weighted = [s * np.sort(s)[-base:].sum() / s.sum() if self.normalize else s for s in scores]
        if self.rows <= window:
            share = [self.rows] * self.heads
        elif self.rule == "kvpress":
            full = [np.append(s, [np.inf] * window) for s in scores]
            for s in full:
                s[np.argsort(-s, kind="stable")[: int(self.rows * self.floor)]] = np.inf
            share = counts(full, self.rows)
        else:
            cut = [min(round(c * (1 - self.floor) + int(base * self.floor)), len(s)) for c, s in zip(counts(weighted, base), scores)]
            share = [c + window for c in cut]
        for h, score in enumerate(scores):
            best = np.argsort(-np.append(score, [np.inf] * window), kind="stable")[: share[h]]
            self.kept[h] = [self.kept[h][i] for i in sorted(best.tolist())]
        self.last = share

    def score(self, head: int, window: int) -> np.ndarray:
        held = self.kept[head]
        seen = sum(self.weights(head, self.q[p][head], p, held) for p in sorted(self.q)[-window:]).mean(0) / window
        return pooled(seen[: len(held) - window], self.kernel, self.pooling)
