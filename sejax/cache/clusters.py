"""Clusters of one sequence's keys: segmented k-means by inner product, on the device, tile by tile.

Temporaries of a job, whatever the pool's size: 3 x H x clusters x D (centroids and two sums), H x segment x D (the keys of one
segment, as stored) and a few H x TILE x share (logits of a tile); at 128K tokens, 8 heads of 128 in bfloat16: about 0.4 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sejax.types import Array

TILE = 2048
ROUNDS = 9  # inside segments; one global round follows


class Job(NamedTuple):
    """What to cluster; all scalars (or all [R]), i32 but for the last. `count` tokens from row `begin` on, cut into `segments`,
    each with an equal part of `clusters`. apart: each segment has its own mean and keeps its clusters to itself."""

    begin: Array
    count: Array
    segments: Array
    clusters: Array
    apart: Array


class Most(NamedTuple):
    """Static bounds of a job: tokens, segments, tokens of a segment, clusters of a segment (its share), clusters."""

    tokens: int
    segments: int
    segment: int
    share: int
    clusters: int


class Clusters(NamedTuple):
    """centroid, value f32[H,C,D] means of the members' keys and values (an empty cluster: a unit key, value 0); size i32[H,C];
    first i32[H,C] where its members begin in member i32[H,T]: tokens, counted from the job's begin, cluster by cluster."""

    centroid: Array
    value: Array
    size: Array
    first: Array
    member: Array


Read = Callable[[Array], Array]  # rows i32[B] -> [H,B,D] as stored


def seeds(index: Array, job: Job) -> Array:
    """Tokens whose keys the centroids start from, evenly spread over the job: i32[C] -> i32[C], in fp32 arithmetic."""
    count, clusters = job.count.astype(jnp.float32), job.clusters.astype(jnp.float32)
    at = index.astype(jnp.float32) * count / clusters + count / clusters / 2
    return jnp.minimum(at.astype(jnp.int32), job.count - 1)


def cluster(keys: Read, values: Read, job: Job, most: Most) -> Clusters:
    """Cluster a job's keys: ROUNDS of (nearest centroid by inner product, mean, normalise) in each segment, then each token to the
    nearest centroid of all (apart: of its segment) and plain means. Keys are centred by their mean. Ties go to the lowest cluster.
    """
    run = _Run(keys, values, job, most)
    centres = run.centres()
    heads, dim = centres.shape[1:]
    units = jnp.zeros((heads, most.clusters + most.share, dim), jnp.float32)
    units = lax.fori_loop(0, job.segments, lambda s, units: run.put(units, s, run.refine(s, centres[s])), units)
    label, key_sum, value_sum, size = run.assign(units, centres)
    seen = slice(0, most.clusters)
    size = size[:, seen]
    whose = jnp.arange(most.clusters, dtype=jnp.int32) // jnp.maximum(run.per, 1)
    centre = jnp.swapaxes(centres[jnp.minimum(whose, most.segments - 1)], 0, 1)
    count = jnp.maximum(size, 1)[..., None]
    centroid = jnp.where(size[..., None] > 0, key_sum[:, seen] / count, units[:, seen] + centre)
    member = jnp.argsort(label[:, : most.tokens], axis=-1, stable=True).astype(jnp.int32)
    return Clusters(centroid, value_sum[:, seen] / count, size, jnp.cumsum(size, axis=-1) - size, member)


class _Run(NamedTuple):
    """One job under way."""

    keys: Read
    values: Read
    job: Job
    most: Most

    @property
    def per(self) -> Array:
        """Clusters of a segment."""
        return self.job.clusters // jnp.maximum(self.job.segments, 1)

    @property
    def tile(self) -> int:
        return min(TILE, self.most.segment)

    @property
    def index(self) -> Array:
        return jnp.arange(self.most.share, dtype=jnp.int32)

    def span(self, s: Array) -> tuple[Array, Array]:
        """First token of segment s, counted from the job's begin, and its tokens."""
        low, high = ((s + i) * self.job.count // jnp.maximum(self.job.segments, 1) for i in (0, 1))
        return low, high - low

    def read(self, of: Read, low: Array, size: Array, width: int) -> Array:
        """Tokens low.. of the job, `width` of them, 0 past the first `size` -> [H,width,D]."""
        at = jnp.arange(width, dtype=jnp.int32)
        return jnp.where((at < size)[:, None], of(self.job.begin + low + at), 0)  # what nobody wrote may be NaN

    def centres(self) -> Array:
        """The mean key that each segment is centred by: f32[S,H,D]."""

        def add(s: Array, sums: Array) -> Array:
            low, size = self.span(s)
            total = jnp.sum(self.read(self.keys, low, size, self.most.segment), axis=1, dtype=jnp.float32)
            return sums.at[s].set(total)

        heads, _, dim = jax.eval_shape(self.keys, self.index).shape
        sums = lax.fori_loop(0, self.job.segments, add, jnp.zeros((self.most.segments, heads, dim), jnp.float32))
        sizes = self.span(jnp.arange(self.most.segments))[1]
        whole = jnp.sum(sums, axis=0) / jnp.maximum(self.job.count, 1)
        return jnp.where(self.job.apart, sums / jnp.maximum(sizes, 1)[:, None, None], whole)

    def refine(self, s: Array, centre: Array) -> Array:
        """Centroids of segment s after ROUNDS, unit vectors: f32[H,share,D]."""
        low, size = self.span(s)
        tiles = -(-self.most.segment // self.tile)
        keys = self.read(self.keys, low, size, tiles * self.tile)
        live = self.index < self.per

        def part(t: Array, sums: tuple[Array, Array], centroids: Array) -> tuple[Array, Array]:
            tile = lax.dynamic_slice_in_dim(keys, t * self.tile, self.tile, axis=1)
            real = t * self.tile + jnp.arange(self.tile) < size
            label = jnp.argmax(_near(tile, centre, centroids, live), axis=-1)
            return _add(sums[0], sums[1], label[..., None] == self.index, real, tile)

        def improve(_: Array, centroids: Array) -> Array:
            nothing = (jnp.zeros_like(centroids), jnp.zeros(centroids.shape[:2], jnp.int32))
            total, count = lax.fori_loop(0, -(-size // self.tile), lambda t, sums: part(t, sums, centroids), nothing)
            mean = total / jnp.maximum(count, 1)[..., None] - centre[:, None]
            centroids = jnp.where(count[..., None] > 0, mean, centroids)
            return centroids / jnp.maximum(jnp.linalg.norm(centroids, axis=-1, keepdims=True), 1e-12)

        start = self.keys(self.job.begin + seeds(s * self.per + self.index, self.job))
        start = jnp.where(live[:, None], start.astype(jnp.float32) - centre[:, None], 0)
        return lax.fori_loop(0, ROUNDS, improve, start)

    def of(self, leaf: Array, s: Array) -> Array:
        """Segment s's part of leaf [H,C,...]: [H,share,...]."""
        return lax.dynamic_slice_in_dim(leaf, s * self.per, self.most.share, axis=1)

    def put(self, leaf: Array, s: Array, new: Array) -> Array:
        live = (self.index < self.per).reshape(-1, *([1] * (leaf.ndim - 2)))
        return lax.dynamic_update_slice_in_dim(leaf, jnp.where(live, new, self.of(leaf, s)), s * self.per, axis=1)

    def assign(self, units: Array, centres: Array) -> tuple[Array, Array, Array, Array]:
        """Each token's cluster i32[H,T], sums of keys and values f32[H,C,D] and sizes i32[H,C]."""
        live, heads = self.index < self.per, units.shape[0]

        def tile(t: Array, found: tuple[Array, ...], s: Array) -> tuple[Array, ...]:
            low, size = self.span(s)
            low, left = low + t * self.tile, size - t * self.tile
            k, v = (self.read(of, low, left, self.tile) for of in (self.keys, self.values))
            real = jnp.arange(self.tile) < left
            first, end = jnp.where(self.job.apart, s, 0), jnp.where(self.job.apart, s + 1, self.job.segments)

            def nearer(g: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
                logits = _near(k, centres[s], self.of(units, g), live)
                value, at = jnp.max(logits, axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32)
                better = value > best[0]
                return jnp.where(better, value, best[0]), jnp.where(better, at + g * self.per, best[1])

            nobody = (jnp.full((heads, self.tile), -jnp.inf), jnp.zeros((heads, self.tile), jnp.int32))
            _, label = lax.fori_loop(first, end, nearer, nobody)

            def add(g: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                hot = (label[..., None] == g * self.per + self.index) & live
                keys, counts = _add(self.of(sums[0], g), self.of(sums[2], g), hot, real, k)
                values, _ = _add(self.of(sums[1], g), counts, hot, real, v)
                return tuple(self.put(leaf, g, new) for leaf, new in zip(sums, (keys, values, counts), strict=True))

            old = lax.dynamic_slice_in_dim(found[0], low, self.tile, axis=1)
            labels = lax.dynamic_update_slice_in_dim(found[0], jnp.where(real, label, old), low, axis=1)
            return (labels, *lax.fori_loop(first, end, add, found[1:]))

        def segment(s: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
            return lax.fori_loop(0, -(-self.span(s)[1] // self.tile), lambda t, found: tile(t, found, s), found)

        labels = jnp.full((heads, self.most.tokens + self.tile), self.most.clusters, jnp.int32)
        nothing = (labels, jnp.zeros_like(units), jnp.zeros_like(units), jnp.zeros(units.shape[:2], jnp.int32))
        return lax.fori_loop(0, self.job.segments, segment, nothing)  # type: ignore[return-value]


def _precision(dtype: jnp.dtype) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _near(keys: Array, centre: Array, centroids: Array, live: Array) -> Array:
    """Inner products of keys [H,B,D], centred, with centroids f32[H,C,D]; -inf where not live -> f32[H,B,C]."""
    centred = keys.astype(jnp.float32) - centre[:, None]
    return jnp.where(live, jnp.einsum("hbd,hcd->hbc", centred, centroids, precision=_precision(keys.dtype)), -jnp.inf)


def _add(sums: Array, counts: Array, hot: Array, real: Array, x: Array) -> tuple[Array, Array]:
    """Sums f32[H,C,D] and counts i32[H,C] with the rows of x [H,B,D] added where hot bool[H,B,C] and real bool[B] say: a product with
    ones, exact in x's own type, because a scatter's order is not repeatable."""
    hot &= real[:, None]
    part = jnp.einsum("hbc,hbd->hcd", hot.astype(x.dtype), x, precision=_precision(x.dtype), preferred_element_type=jnp.float32)
    return sums + part, counts + jnp.sum(hot, axis=1, dtype=jnp.int32)
