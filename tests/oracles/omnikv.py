"""Observers choose the prompt tokens that later layers read (METHODS 0 and 6.2). A step's choice lies in the layer object below."""

from typing import Any, ClassVar

import numpy as np

from tests.oracles.transformer import Layer, New, softmax


def token_scores(query: np.ndarray, keys: np.ndarray, selector: str) -> np.ndarray:
    """query [H,G,D], keys [T,H,D] -> the largest over all query heads, [T]."""
    logits = np.einsum("hgd,thd->hgt", query, keys) / np.sqrt(query.shape[-1])
    return (softmax(logits) if selector == "softmax" else logits).max((0, 1))


class Oracle(Layer):
    chosen: ClassVar[list[int]] = []  # by the last observer of the running step

    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        super().__init__(index, layers, heads, **arguments)
        self.prompt_end = 0

    def seal(self, new: New) -> None:
        self.prompt_end = len(self.k)

    def read(self, new: New) -> np.ndarray:
        if self.index in self.observers:
            count = min(self.prompt_end, self.budget or int(self.ratio * self.prompt_end))
            keys = np.stack([self.k[p] for p in range(self.prompt_end)])
            best = np.argsort(-token_scores(new.q[0], keys, self.selector), kind="stable")[:count]
            Oracle.chosen = sorted(best.tolist())
        below = [o for o in self.observers if o < self.index]
        if not below or self.index in self.observers or self.index <= max(below) + self.wait:
            return super().read(new)
        read = [*Oracle.chosen, *range(self.prompt_end, len(self.k))]
        return np.stack([self.output(h, new.q[0, h], int(new.pos[0]), read) for h in range(self.heads)])[None]
