"""Window attention, pooled (METHODS 0 and 4.3)."""

import numpy as np

from tests.oracles.transformer import Evicting


def pooled(score: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    half = kernel // 2
    if kind == "avg":
        padded = np.pad(score, half)
        return np.array([padded[i : i + kernel].sum() / kernel for i in range(len(score))])
    return np.array([score[max(0, i - half) : i + half + 1].max() for i in range(len(score))])


def by_chunk(score: np.ndarray, chunk: int) -> np.ndarray:
    return np.array([score[i - i % chunk : i - i % chunk + chunk].mean() for i in range(len(score))])


class Oracle(Evicting):
    """score = pool(group mean of the window's summed attention); "shared": the largest over all query heads."""

    chunk: int | None = None

    def score(self, head: int, window: int) -> np.ndarray:
        held = self.kept[head]
        latest = sorted(self.q)[-window:]
        seen = sum(self.weights(head, self.q[p][head], p, held) for p in latest)
        seen = seen.max(0) if self.heads_mode == "shared" else seen.mean(0)
        return seen[: len(held) - window]

    def joined(self, scores: list[np.ndarray]) -> list[np.ndarray]:
        if self.heads_mode == "shared":
            scores = [np.max(scores, axis=0)] * self.heads
        smooth = [by_chunk(s, self.chunk) if self.chunk else pooled(s, self.kernel, self.pooling) for s in scores]
        return [self.protect(s, len(held)) for s, held in zip(smooth, self.kept, strict=True)]

    def protect(self, score: np.ndarray, held: int) -> np.ndarray:
        full = np.full(held, np.inf)
        full[: len(score)] = score
        full[: self.sinks] = np.inf
        return full
