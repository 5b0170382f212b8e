"""Exact, estimated and steady zones over clustered keys (METHODS 0 and 6.3)."""

import math
from typing import Any, NamedTuple

import numpy as np

from tests.oracles.transformer import Layer, New, softmax


class Cluster(NamedTuple):
    centroid: np.ndarray
    members: list[int]  # positions


def split(length: int, segment: int, cluster: int) -> tuple[int, int]:
    """Segments and clusters of a sequence."""
    segments = max(round(length / segment), 1)
    of = math.lcm(8, segments)
    wanted = max(round(length / cluster), of)
    return segments, min(range(of, 2 * wanted + of, of), key=lambda n: (abs(n - wanted), n))


def shares(clusters: int, ratio: float, estimate: float) -> tuple[int, int]:
    """Clusters read exactly, and estimated."""
    exact = min(max(round(ratio * clusters), 1), clusters)
    return exact, min(round(estimate * clusters), clusters - exact)


def nearest(x: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, float]:
    """The centroid of largest inner product, and the closest call."""
    scores = x @ centroids.T
    return scores.argmax(1), closest(np.sort(scores, axis=1)[:, -2:])


def closest(scores: np.ndarray) -> float:
    """The smallest gap between neighbours; equal ones go by their number, not by chance."""
    gaps = np.abs(np.diff(scores, axis=-1))
    return float(gaps[gaps > 0].min(initial=np.inf))


def kmeans(keys: np.ndarray, segments: int, count: int) -> tuple[np.ndarray, np.ndarray, float]:
    """keys [T,D] -> each token's cluster [T], centroids [C,D], and the closest call of all rounds."""
    total, per, f32, margin = len(keys), count // segments, np.float32, np.inf
    mean = keys.mean(0)
    x = keys - mean
    seeds = [int(f32(i) * f32(total) / f32(count) + f32(total) / f32(count) / f32(2)) for i in range(count)]
    units = x[seeds]
    for s in range(segments):
        mine, part = slice(s * per, (s + 1) * per), x[s * total // segments : (s + 1) * total // segments]
        for _ in range(9):
            label, near = nearest(part, units[mine])
            margin = min(margin, near)
            new = np.stack([part[label == c].mean(0) if (label == c).any() else units[mine][c] for c in range(per)])
            units[mine] = new / np.maximum(np.linalg.norm(new, axis=1, keepdims=True), 1e-12)
    label, near = nearest(x, units)
    centroids = np.stack([x[label == c].mean(0) if (label == c).any() else units[c] for c in range(count)])
    return label, centroids + mean, min(margin, near)


class Oracle(Layer):
    ratio: float
    estimate: float
    sinks: int
    recent: int
    cluster: int
    threshold: int
    update: int
    segment: int

    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        super().__init__(index, layers, heads, **arguments)
        self.clusters: list[list[Cluster]] = [[] for _ in range(heads)]
        self.end, self.exact, self.estimated, self.margin = self.sinks, 0, 0, np.inf

    def seal(self, new: New) -> None:
        length = len(self.k)
        if not any(self.clusters) and length - self.sinks - self.recent >= self.threshold:
            self.add_clusters(length - self.sinks - self.recent, *split(length, self.segment, self.cluster))
        while any(self.clusters) and length - self.recent - self.end >= self.update:
            self.add_clusters(self.update, 1, self.update // self.cluster)

    def trim(self, new: New) -> None:
        size = self.update if any(self.clusters) else self.threshold
        if len(self.k) - self.recent - self.end >= size:
            self.add_clusters(size, 1, size // self.cluster)

    def add_clusters(self, tokens: int, segments: int, count: int) -> None:
        for h in range(self.heads):
            keys = np.stack([self.k[self.end + t][h] for t in range(tokens)])
            label, centroids, margin = kmeans(keys, segments, count)
            self.margin = min(self.margin, margin)
            self.clusters[h] += [Cluster(centroids[c], (self.end + np.flatnonzero(label == c)).tolist()) for c in range(count)]
        exact, estimated = shares(count, self.ratio, self.estimate)
        self.end, self.exact, self.estimated = self.end + tokens, self.exact + exact, self.estimated + estimated

    def ranked(self, head: int, query: np.ndarray) -> tuple[list[int], list[int]]:
        """Clusters read exactly, and those estimated, for query [G,D]."""
        clusters = self.clusters[head]
        if not clusters:
            return [], []
        score = softmax(query @ np.stack([c.centroid for c in clusters]).T / np.sqrt(query.shape[-1])).sum(0)
        score[[not c.members for c in clusters]] = -np.inf
        order = [int(c) for c in np.argsort(-score, kind="stable") if clusters[c].members][: self.exact + self.estimated]
        falling = np.sort(score[score > -np.inf])[::-1]
        cuts = (self.exact, self.exact + self.estimated)
        self.margin = min([self.margin, *(closest(falling[i - 1 : i + 1]) for i in cuts if i < len(falling))])
        read = np.cumsum([len(clusters[c].members) for c in order[: self.exact]])
        fit = int((read <= 2 * self.cluster * self.exact).sum())
        return order[:fit], order[fit:]

    def read(self, new: New) -> np.ndarray:
        return np.stack([self.mixed(h, new.q[0, h]) for h in range(self.heads)])[None]

    def mixed(self, head: int, query: np.ndarray) -> np.ndarray:
        """One softmax over steady and retrieved tokens and estimated clusters, for query [G,D]."""
        clusters = self.clusters[head]
        exact, estimated = self.ranked(head, query)
        steady = sorted({*range(min(self.sinks, len(self.k))), *range(self.end, len(self.k))})
        read = [*steady, *(p for c in exact for p in clusters[c].members)]
        keys = [*(self.k[p][head] for p in read), *(clusters[c].centroid for c in estimated)]
        values = [*(self.v[p][head] for p in read), *(sum(self.v[p][head] for p in clusters[c].members) for c in estimated)]
        sizes = np.asarray([1] * len(read) + [len(clusters[c].members) for c in estimated])
        weight = np.exp(query @ np.stack(keys).T / np.sqrt(query.shape[-1]))
        return weight @ np.stack(values) / (weight @ sizes)[:, None]
