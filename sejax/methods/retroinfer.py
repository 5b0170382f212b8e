"""Keep everything, cluster the keys: read the best clusters token by token, the next best as one token each."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sejax.cache.clusters import Clusters, Job, Most, cluster
from sejax.cache.compose import Layer
from sejax.cache.method import Parts, check
from sejax.cache.ring import of_slot
from sejax.cache.storage import raw
from sejax.kernels import rows as kernel
from sejax.kernels.attention import attend, mass
from sejax.types import Array, AttentionView, Hooks, LayerMethod, LayerSpec, Method, Qkv, Rows, State


def retroinfer(
    ratio: float = 0.018,
    estimate: float = 0.232,
    sinks: int = 4,
    recent: int = 64,
    cluster: int = 16,
    threshold: int = 16384,
    update: int = 1024,
    segment: int = 8192,
    page: int = 16,
) -> Method:
    """Read a few clusters of tokens exactly and many more as one token each; ignore the rest.

    rank of a cluster = sum over the group of softmax over clusters (q . C / sqrt(D)), C its mean key. The best `ratio` of the n
    clusters are read token by token; the next `estimate` add exp(q . C / sqrt(D)) times (sum of values) above and times size below
    the line; sinks and all tokens since the last index update are exact; one softmax over all three.

    Family: selection
    Paper: Chen et al. 2025, RetroInfer, arXiv 2505.02922 (microsoft/RetrievalAttention).
    Differs: all on the device, no host tier. The same threshold for every batch. The exact list holds 2 x cluster x (clusters read
        exactly) tokens: clusters that do not fit, taken in order of rank, are estimated. Mean values are stored instead of sums.
    Keeps: every token, and beside them a mean key, a mean value and 4 + 8 / cluster bytes of lists for every `cluster` tokens. A
        decode step reads all mean keys and at most (2 x ratio + estimate / cluster) of the tokens, and those not yet indexed.

    Args:
        ratio: fraction of the clusters that a decode step reads token by token, at least one.
        estimate: fraction of the clusters, the next best, that it reads as one token each.
        sinks: first tokens, always read exactly.
        recent: last tokens that an index update leaves out.
        cluster: tokens of a cluster, in the mean.
        threshold: tokens between sinks and recent from which on there is an index; before that all is read.
        update: decoded tokens after which the oldest not indexed become clusters of their own.
        segment: tokens that are clustered together.
        page: tokens a page of the pool.
    """
    check(0 < ratio <= 1, f"ratio={ratio} must lie in (0, 1]: the fraction of the clusters that is read exactly")
    check(0 <= estimate <= 1, f"estimate={estimate} must lie in [0, 1]: the fraction of the clusters that is estimated")
    check(sinks >= 0, f"sinks={sinks} must be >= 0 tokens")
    check(recent >= 1, f"recent={recent} must be at least 1 token")
    check(cluster >= 1, f"cluster={cluster} must be at least 1 token; the usual value is 16")
    for key, value in dict(threshold=threshold, update=update).items():
        nearest = max(1, round(value / cluster)) * cluster
        check(value >= cluster and value % cluster == 0, f"{key}={value} must be a multiple of cluster={cluster}; use {nearest}")
    check(segment >= 1, f"segment={segment} must be at least 1 token; the usual value is 8192")
    check(page >= 1, f"page={page} must be at least 1 token; the usual value is 16")
    rule = Rule(ratio, estimate, sinks, recent, cluster, threshold, update, segment)

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        return Clustered(Layer(spec, raw(page), None, None), rule).method()

    parts = Parts(raw(page), traits=frozenset({"selection", "cluster selection"}))
    return Method("retroinfer", (*rule._asdict().items(), ("page", page)), layer, "chunk", growing=True, parts=parts)


class Limits(NamedTuple):
    """Static sizes for runs of some length: clusters of a sequence, those read exactly, those ranked; a prompt's and a step's job."""

    clusters: int
    exact: int
    ranked: int
    prompt: Most
    step: Most


class Rule(NamedTuple):
    """The hyper-parameters and their arithmetic."""

    ratio: float
    estimate: float
    sinks: int
    recent: int
    cluster: int
    threshold: int
    update: int
    segment: int

    @property
    def around(self) -> int:
        """Tokens that no first index covers."""
        return self.sinks + self.recent

    def split(self, length: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """Segments and clusters for a sequence of `length` tokens, i32 arrays of any shape: the clusters are rounded to the nearest
        multiple of lcm(8, segments), ties down."""
        segments = xp.maximum(_half_even(length, self.segment), 1)
        of = 8 * segments // xp.minimum(segments & -segments, 8)
        wanted = xp.maximum(_half_even(length, self.cluster), of)
        return segments, (wanted // of + (2 * (wanted % of) > of)) * of

    def shares(self, clusters: int) -> np.ndarray:
        """Clusters read exactly and estimated, by the number of clusters 0..clusters: i32[clusters+1,2], in double precision."""
        n = np.arange(clusters + 1)
        exact = np.minimum(np.maximum(np.rint(self.ratio * n), 1), n)
        return np.stack([exact, np.minimum(np.rint(self.estimate * n), n - exact)], axis=1).astype(np.int32)

    @property
    def block(self) -> tuple[int, int, int]:
        """Clusters of an update, those of them that are read exactly, and estimated."""
        n = self.update // self.cluster
        return (n, *self.shares(n)[n].tolist())

    def pages(self, rows: int, page: int) -> int:
        """Pages for `rows` tokens and as many clusters as they may have: each page carries one."""
        own = -(-rows // page)
        if rows < self.threshold + self.around:
            return own
        segments = rows // self.segment + 1
        return max(own, -(-rows // self.cluster) + 4 * segments + 1, 8 * segments)


def _half_even(x: Any, by: int) -> Any:
    """x / by rounded, halves to even: Python's round, in whole numbers."""
    low, rest = x // by, x % by
    return low + ((2 * rest > by) | ((2 * rest == by) & (low % 2 == 1)))


@functools.cache
def limits(rule: Rule, room: int) -> Limits | None:
    """Bounds for runs of `room` token rows; None where there is never an index. Tries every length that a first index may have."""
    length = np.arange(rule.threshold + rule.around, room + 1)
    if not len(length):
        return None
    segments, clusters = rule.split(length, np)
    indexed = length - rule.around
    most, step = int((length[-1] - length[0]) // rule.update), max(rule.threshold, rule.update)
    each, exact_each, estimated_each = rule.block
    prompt = Most(
        int(indexed.max()),
        max(int(segments.max()), most),
        max(int((-(-indexed // segments)).max()), rule.update),
        max(int((clusters // segments).max()), each),
        max(int(clusters.max()), each * most),
    )
    first = np.append(clusters, rule.threshold // rule.cluster)  # the last one is made while decoding
    updates = np.append((room - length) // rule.update, most)
    exact, estimated = rule.shares(int(first.max()))[first].T
    return Limits(
        int((first + each * updates).max()),
        int((exact + exact_each * updates).max()),
        int((exact + estimated + (exact_each + estimated_each) * updates).max()),
        prompt,
        Most(step, 1, step, step // rule.cluster, step // rule.cluster),
    )


@dataclasses.dataclass(frozen=True)
class Clustered:
    """A layer that keeps everything and an index of it. Token r of a run of pages is row r; cluster c lies with page c.

    Page leaves "clusters": "k", "v" [N,H,1,D] mean key and value, "size" i32[N,H,1], "first" i32[N,H,1] where its members begin in
    "member" i32[N,H,P]: a list over the run's rows, of the same tokens as there, cluster by cluster. Row leaves i32[S]: "indexed"
    tokens of the first index (behind the sinks), its "groups" (clusters), how many of them are read "exact" and "estimated", and
    "updates" since, each of `update` tokens.
    """

    layer: Layer
    rule: Rule

    LEAVES = ("indexed", "groups", "exact", "estimated", "updates")

    def method(self) -> LayerMethod:
        prefill = Hooks(self.init, self.layer.write, self.layer.read_all)
        decode = prefill._replace(before_attention=self.read, after_step=self.extend)
        room = lambda rows: self.rule.pages(rows, self.layer.storage.page)  # noqa: E731
        return self.layer.keeping()._replace(
            prefill=prefill, decode=decode, seal=self.seal, due=self.due, truncate=self.truncate, room=room
        )

    def init(self, slots: int, pages: int) -> State:
        state, spec = self.layer.init(slots, pages), self.layer.spec
        mean, one = (pages, spec.heads, 1, spec.head_dim), (pages, spec.heads, 1)
        index = {name: jnp.zeros(mean, spec.dtype) for name in ("k", "v")} | {name: jnp.zeros(one, jnp.int32) for name in ("size", "first")}
        index["member"] = jnp.zeros((pages, spec.heads, self.layer.storage.page), jnp.int32)
        return State(state.pages | {"clusters": index}, state.rows | {name: jnp.zeros(slots, jnp.int32) for name in self.LEAVES})

    def limits(self, rows: Rows) -> Limits | None:
        return limits(self.rule, rows.table.shape[1] * self.layer.storage.page)

    def own(self, state: State, rows: Rows) -> dict[str, Array]:
        """The row leaves [R], and "end": the first token that is not indexed; "n": tokens held."""
        own = {name: of_slot(state.rows[name], rows) for name in self.LEAVES}
        end = self.rule.sinks + own["indexed"] + own["updates"] * self.rule.update
        return own | {"end": end, "n": of_slot(state.rows["n"], rows)[:, 0]}

    # ---- the index ----

    def seal(self, state: State, rows: Rows) -> State:
        """At a prompt's end: the first index, or, where there is one, the updates that the new tokens fill."""
        rule, most = self.rule, self.limits(rows)
        if most is None:
            return state
        own, length = self.own(state, rows), rows.start + rows.count
        some = rows.count > 0
        begins = some & (own["indexed"] == 0) & (length - rule.around >= rule.threshold)
        segments, clusters = rule.split(length)
        clusters = jnp.where(begins, clusters, 0)
        more = jnp.where(some & (own["indexed"] > 0), jnp.maximum(length - rule.recent - own["end"], 0) // rule.update, 0)
        job = Job(
            jnp.where(begins, rule.sinks, own["end"]),
            jnp.where(begins, length - rule.around, more * rule.update),
            jnp.where(begins, segments, more),
            jnp.where(begins, clusters, more * rule.block[0]),
            ~begins,
        )
        return self.index(state, rows, job, most.prompt, begins)

    def extend(self, state: State, rows: Rows) -> State:
        """While decoding: rows that are due get one update, or their first index, a single segment."""
        most, rule = self.limits(rows), self.rule
        if most is None:
            return state
        own, due = self.own(state, rows), self.due(state, rows)
        begins = due & (own["indexed"] == 0)
        count = jnp.where(due, jnp.where(begins, rule.threshold, rule.update), 0)
        return self.index(state, rows, Job(own["end"], count, due.astype(jnp.int32), count // rule.cluster, due), most.step, begins)

    def due(self, state: State, rows: Rows) -> Array:
        own = self.own(state, rows)
        tail = own["n"] - self.rule.recent - own["end"]
        full = tail >= jnp.where(own["indexed"] > 0, self.rule.update, self.rule.threshold)
        return full & (rows.slot < state.rows["n"].shape[0])

    def index(self, state: State, rows: Rows, job: Job, most: Most, begins: Array) -> State:
        """Store each row's clusters. job: of each row [R]; begins bool[R]: it is the row's first index. Rows one after the other,
        each within the memory that cache.clusters states; the results of all, R x H x (2 x clusters x D + tokens), together."""
        own, kv, storage = self.own(state, rows), state.pages["kv"], self.layer.storage
        head = jnp.arange(self.layer.spec.heads, dtype=jnp.int32)

        def build(table: Array, job: Job) -> Clusters:
            def reads(of: Any) -> Any:
                return lambda row: of(kv, table[None], jnp.broadcast_to(row, (1, head.shape[0], row.shape[0])))[0]

            found = cluster(reads(storage.keys), reads(storage.values), job, most)
            dtype = self.layer.spec.dtype
            return found._replace(centroid=found.centroid.astype(dtype), value=found.value.astype(dtype))

        def one(given: tuple[Array, Job]) -> Clusters:
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(build, *given))
            return lax.cond(given[1].count > 0, build, lambda *_: empty, *given)

        found = lax.map(one, (rows.table, job))
        base = own["groups"] + own["updates"] * self.rule.block[0]  # of an idle row it names nothing
        pages = state.pages["clusters"] | self.stored(state.pages["clusters"], rows, job, found, base)
        exact, estimated = jnp.moveaxis(jnp.asarray(self.rule.shares(most.clusters))[job.clusters], -1, 0)
        new = {"indexed": job.count, "groups": job.clusters, "exact": exact, "estimated": estimated}
        after = {name: jnp.where(begins, x, own[name]) for name, x in new.items()}
        after["updates"] = own["updates"] + jnp.where(begins, 0, job.count // self.rule.update)
        held = state.rows | {name: state.rows[name].at[rows.slot].set(x, mode="drop") for name, x in after.items()}
        return State(state.pages | {"clusters": pages}, held)

    def stored(self, leaves: dict[str, Array], rows: Rows, job: Job, found: Clusters, base: Array) -> dict[str, Array]:
        """Page leaves with `found` [R,...] put in: clusters behind cluster base i32[R], members where their tokens are."""

        def places(width: int, count: Array, start: Array) -> Array:
            at = jnp.arange(width, dtype=jnp.int32)
            at = jnp.where(at < count[:, None], start[:, None] + at, -1)
            return jnp.broadcast_to(at[..., None], (*at.shape, self.layer.spec.heads))

        swap = lambda x: jnp.swapaxes(x, 1, 2)  # noqa: E731
        begin = job.begin[:, None, None]
        new = {"k": found.centroid, "v": found.value, "size": found.size, "first": found.first + begin}
        at = places(found.size.shape[2], job.clusters, base)
        after = {name: kernel.put(leaves[name], rows.table, at, swap(x)) for name, x in new.items()}
        at = places(found.member.shape[2], job.count, job.begin)
        return after | {"member": kernel.put(leaves["member"], rows.table, at, swap(found.member + begin))}

    def truncate(self, state: State, rows: Rows) -> State:
        """As if the tokens at positions >= start had never come: an index that covers or waited for any of them goes."""
        shorten = self.layer.keeping().truncate
        assert shorten
        after, own = shorten(state, rows), self.own(state, rows)
        stays = rows.start - self.rule.around - own["indexed"]
        updates = jnp.minimum(own["updates"], stays // self.rule.update)
        kept = {name: jnp.where(stays >= 0, own[name], 0) for name in self.LEAVES} | {"updates": jnp.where(stays >= 0, updates, 0)}
        return State(after.pages, after.rows | {name: after.rows[name].at[rows.slot].set(x, mode="drop") for name, x in kept.items()})

    # ---- reading ----

    def read(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        """Three views: sinks and the best clusters' tokens, the next clusters' means, and all tokens since the last update."""
        most, page, pages = self.limits(rows), self.layer.storage.page, rows.table.shape[1]
        if most is None:
            return self.layer.read_all(state, qkv, carry, rows)
        own, view = self.own(state, rows), self.layer.storage.view
        score, size = self.scores(state, qkv.q, rows, own, min(most.clusters, pages))
        value, rank = lax.top_k(score, min(most.ranked, score.shape[-1]))
        real = (value > -jnp.inf).astype(jnp.int32)
        size = jnp.take_along_axis(size, rank, axis=-1) * real
        exact, estimated = self.wanted(own)
        fit, listed, length = self.tokens(state, rows, own, rank, size, exact, min(most.exact, rank.shape[-1]))
        near = view(state.pages["kv"], ids=listed, length=length, run=1)
        head = jnp.arange(self.layer.spec.heads, dtype=jnp.int32)[:, None]
        entry = jnp.take_along_axis(rows.table[:, None], rank, axis=-1) * head.shape[0] + head
        ranked = jnp.minimum(jnp.sum(real, axis=-1), (exact + estimated)[:, None])
        means = state.pages["clusters"]
        bias = jnp.log(jnp.maximum(size, 1).astype(jnp.float32))
        far = AttentionView(k=means["k"], v=means["v"], ids=entry, first=fit, length=ranked, bias=bias, run=1)
        skipped = own["end"] // page  # whole pages before the first token that is not indexed are not even listed
        at = jnp.minimum(jnp.arange(pages, dtype=jnp.int32) + skipped[:, None], pages - 1)
        ids = jnp.take_along_axis(rows.table, at, axis=1)
        tail = view(state.pages["kv"], ids=ids, length=own["n"] - skipped * page, first=own["end"] - skipped * page)
        return (near, far, tail), carry

    def wanted(self, own: dict[str, Array]) -> tuple[Array, Array]:
        """Clusters to read exactly and to estimate: two i32[R]."""
        _, exact, estimated = self.rule.block
        return own["exact"] + own["updates"] * exact, own["estimated"] + own["updates"] * estimated

    def scores(self, state: State, q: Array, rows: Rows, own: dict[str, Array], most: int) -> tuple[Array, Array]:
        """Each cluster's score f32[R,H,C], -inf for empty ones and where there is none, and its size i32[R,H,C]."""
        leaves, ids = state.pages["clusters"], rows.table[:, :most]
        count = own["groups"] + own["updates"] * self.rule.block[0]
        means = AttentionView(k=leaves["k"], v=leaves["k"], ids=ids, length=count, run=1)
        weight = mass(q, means, attend(q, means)[1], jnp.ones(q.shape[:2], bool))  # the softmax over all clusters
        at = jnp.arange(ids.shape[1], dtype=jnp.int32)
        size = kernel.take(leaves["size"], rows.table, jnp.broadcast_to(at, (*weight.shape[:2], at.shape[0])))
        some = (at < count[:, None, None]) & (size > 0)
        return jnp.where(some, jnp.sum(weight, axis=2), -jnp.inf), size

    def tokens(
        self, state: State, rows: Rows, own: dict[str, Array], rank: Array, size: Array, exact: Array, most: int
    ) -> tuple[Array, Array, Array]:
        """The exact list: sinks, then the members of the first `exact` i32[R] clusters of rank i32[R,H,K] that fit.

        -> how many fit i32[R,H], head-page entries of one token i32[R,H,M], tokens listed i32[R,H].
        """
        rule, leaves, page = self.rule, state.pages["clusters"], self.layer.storage.page
        rank, size = rank[..., :most], size[..., :most]
        wanted = (jnp.arange(most) < exact[:, None, None]) & (size > 0)
        upto = jnp.cumsum(jnp.where(wanted, size, 0), axis=-1)
        fits = wanted & (upto <= 2 * rule.cluster * exact[:, None, None])
        width = min(2 * rule.cluster * most, rows.table.shape[1] * page)
        place = jnp.arange(width, dtype=jnp.int32)
        which = jnp.minimum(jnp.sum(upto[..., None, :] <= place[:, None], axis=-1), most - 1)
        start = kernel.take(leaves["first"], rows.table, rank) - (upto - size)
        member = kernel.take(leaves["member"], rows.table, jnp.take_along_axis(start, which, axis=-1) + place)
        first = jnp.broadcast_to(jnp.arange(rule.sinks, dtype=jnp.int32), (*rank.shape[:2], rule.sinks))
        token = jnp.concatenate([first, member], axis=-1)
        spot, offset = kernel.locate(rows.table, token, page, leaves["size"].shape[0])
        head = jnp.arange(rank.shape[1], dtype=jnp.int32)[:, None]
        total = jnp.max(jnp.where(fits, upto, 0), axis=-1)
        length = jnp.minimum(own["n"], rule.sinks)[:, None] + total
        return jnp.sum(fits, axis=-1, dtype=jnp.int32), (spot * rank.shape[1] + head) * page + offset, length
