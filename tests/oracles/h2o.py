"""Attention received so far (METHODS 0 and 4.2)."""

from collections import Counter
from typing import Any

import numpy as np

from tests.oracles.transformer import Evicting, New


class Oracle(Evicting):
    recent: int | None
    prefill_budget: int | None

    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        super().__init__(index, layers, heads, **arguments)
        self.slack = self.period
        self.received = [Counter() for _ in range(heads)]

    def prompt(self, new: New) -> np.ndarray:
        if self.prefill_budget is None:
            return super().prompt(new)
        out = []
        for at in range(0, len(new.pos), self.call):
            chunk = New(*(x[at : at + self.call] for x in new))
            self.add(chunk)
            out.append(self.read(chunk))
            for h, held in enumerate(self.kept):
                older = [p for p in held if p < new.pos[0]]
                score, staged = self.score(h, 0)[len(older) :], held[len(older) :]
                best = np.argsort(-score, kind="stable")[: self.prefill_budget]
                self.kept[h] = older + [staged[i] for i in sorted(best.tolist())]
        self.seal(new)
        return np.concatenate(out)

    def output(self, head: int, query: np.ndarray, at: int, positions: list[int]) -> np.ndarray:
        for p, weight in zip(positions, self.weights(head, query, at, positions).mean(0), strict=True):
            self.received[head][p] += weight
        return super().output(head, query, at, positions)

    def score(self, head: int, window: int) -> np.ndarray:
        held = self.kept[head]
        score = np.array([self.received[head][p] / (len(self.k) - p if self.normalise else 1) for p in held])
        recent = self.rows // 2 if self.recent is None else self.recent
        score[max(0, len(held) - recent) :] = np.inf
        return score
