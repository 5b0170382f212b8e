"""Repeated sentences go first (METHODS 0 and 4.8): spans from the whole history, plain loops."""

from typing import Any

import numpy as np

from tests.oracles.transformer import Evicting, Layer, New, softmax


def spans(tokens: list[int], delimiters: tuple[int, ...], shortest: int, longest: int) -> list[tuple[int, int]]:
    """[first, end) of every sentence."""
    found, first = [], 0
    for p, token in enumerate(tokens):
        if token in delimiters:
            if shortest <= p + 1 - first <= longest:
                found.append((first, p + 1))
            first = p + 1
    return found


def importance(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """queries [W,G,D] over the candidates' keys [C,D] -> [C]."""
    return softmax(np.einsum("wgd,cd->gwc", queries, keys) / np.sqrt(keys.shape[-1])).mean(1).max(0)


def cosines(x: np.ndarray) -> np.ndarray:
    unit = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-20)
    return unit @ unit.T


def repeats(means: np.ndarray, tau: float) -> np.ndarray:
    """Rows of [N,*], earliest first -> the largest cosine of each to a later one, 0 below tau."""
    like = cosines(means)
    return np.array([max([c for c in like[i, i + 1 :] if c >= tau], default=0.0) for i in range(len(like))])


def token_redundancy(keys: np.ndarray, threshold: float) -> np.ndarray:
    like = cosines(keys)
    np.fill_diagonal(like, 0)
    like[like < threshold] = 0
    for i, row in enumerate(like):
        later = [j for j in range(i + 1, len(row)) if row[j] > 0]
        if later:
            row[later[-1]] = 0
    return softmax(like.mean(1))


def segment_penalty(keys: np.ndarray, segment: int, tau: float) -> np.ndarray:
    starts = range(0, len(keys), segment)
    penalty = repeats(np.stack([keys[s : s + segment].mean(0) for s in starts]), tau)
    return np.repeat(penalty, segment)[: len(keys)]


class Oracle(Evicting):
    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        super().__init__(index, layers, heads, **arguments)
        self.slack, self.available, self.first = self.period, 0, False
        self.tokens, self.hidden, self.penalty = [], [], {}

    def seal(self, new: New) -> None:
        self.available, self.first = min(self.window, len(new.pos)), new.pos[0] == 0

    def trim(self, new: New) -> None:
        self.available, self.first = min(self.window, self.available + 1), False

    def finish(self, layers: list[Layer], tokens: list[int], hidden: np.ndarray, prompt: bool) -> None:
        if self.index < self.layers - 1:
            return
        self.tokens += list(tokens)
        self.hidden += list(hidden)
        told = spans(self.tokens, self.delimiters, self.shortest, self.longest)[-self.sentences :]
        penalty = repeats(np.stack([np.mean(self.hidden[a:b], axis=0) for a, b in told]), self.tau) if told else []
        by_position = {p: x for (a, b), x in zip(told, penalty, strict=True) for p in range(a, b)}
        for layer in layers:
            layer.penalty = by_position
            if prompt or self.slack:  # 0: never while decoding
                layer.evict(layer.available, None if layer.first else layer.rows + max(self.slack, 1))

    def score(self, head: int, window: int) -> np.ndarray:
        held = self.kept[head]
        keys = np.stack([self.k[p][head] for p in held])
        queries = np.stack([self.q[p][head] for p in sorted(self.q)[-window:]])
        score, past = np.full(len(held), np.inf), len(held) - window
        if past <= self.sinks:
            return score
        free = keys[self.sinks : past]
        told = np.array([self.penalty.get(p, 0.0) for p in held[self.sinks : past]])
        found, near = importance(queries, free) - self.weight * told, free[-self.near :]
        found[-self.near :] -= self.alpha * token_redundancy(near, self.threshold)
        if not told.any():
            found[-self.near :] -= self.weight * segment_penalty(near, self.segment, self.tau)
        score[self.sinks : past] = found
        return score
