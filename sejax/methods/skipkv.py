"""Drop first what a later sentence says again (experimental)."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sejax.cache.compose import Part
from sejax.cache.inplace import InPlace
from sejax.cache.method import check, composed, either
from sejax.cache.retention import LOCAL_SETS, Candidates, Retention, amount
from sejax.cache.ring import of_slot, recall
from sejax.cache.storage import raw
from sejax.kernels import rows as kernel
from sejax.kernels.attention import attend, mass
from sejax.types import HOLE, Array, LayerMethod, LayerSpec, Method, Rows, State

DELIMITER = re.compile(r"[.!?…。！？)]*\s*\n")
"""The whole text of a token that ends a sentence: a line's end, with the punctuation a vocabulary may have merged into it."""


class Rule(NamedTuple):
    """skipkv's arguments that scores and sentences need."""

    sinks: int
    alpha: float
    weight: float
    threshold: float
    tau: float
    near: int
    segment: int
    shortest: int
    longest: int
    sentences: int
    delimiters: tuple[int, ...] | None


def checked(rule: Rule) -> Rule:
    """The rule, if its numbers can be."""
    check(rule.alpha >= 0 and rule.weight >= 0, f"alpha={rule.alpha} and weight={rule.weight} must be >= 0")
    cosines = f"threshold={rule.threshold} and tau={rule.tau} are cosines: they must lie in (0, 1]"
    check(0 < rule.threshold <= 1 and 0 < rule.tau <= 1, cosines)
    check(rule.near >= 1 and rule.segment >= 1, f"near={rule.near} and segment={rule.segment} must be at least 1 token")
    lengths = f"shortest={rule.shortest} must be at least 1 and at most longest={rule.longest}"
    check(1 <= rule.shortest <= rule.longest, lengths)
    check(rule.sentences >= 1, f"sentences={rule.sentences} must be at least 1")
    check(rule.delimiters != (), "delimiters=() is empty; give the ids of tokens that end a sentence, or leave it out")
    return rule


@functools.lru_cache(maxsize=8)
def delimiters_of(tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens that end a sentence, from one pass over the vocabulary."""
    texts = (tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(tokenizer.vocab_size))
    return tuple(i for i, text in enumerate(texts) if DELIMITER.fullmatch(text))


def empty(slots: int, sentences: int, hidden: int, dtype: Any) -> dict[str, Array]:
    """The table of one model: of the sentence under way its sum of hidden states and first position; how many have ended; of the
    last `sentences` of them the mean hidden state (length 1), and positions [first, end)."""
    return {
        "sum": jnp.zeros((slots, hidden), jnp.float32),
        "began": jnp.zeros(slots, jnp.int32),
        "ended": jnp.zeros(slots, jnp.int32),
        "mean": jnp.zeros((slots, sentences, hidden), dtype),
        "first": jnp.zeros((slots, sentences), jnp.int32),
        "end": jnp.zeros((slots, sentences), jnp.int32),
    }


def listen(table: dict[str, Array], hidden: Array, rows: Rows, rule: Rule) -> dict[str, Array]:
    """Put the sentences that end among the new tokens into the table; hidden [R,T,E] of the last layer.

    Beside them two arrays exist at once: f32[R,K+1,T] and f32[R,K+1,E], K = min(T / shortest + 1, sentences).
    """
    new = jnp.arange(hidden.shape[1], dtype=jnp.int32)
    most = min(new.shape[0] // rule.shortest + 1, rule.sentences)
    held = {name: of_slot(table[name], rows) for name in ("sum", "began", "ended")}
    held, table = lax.optimization_barrier((held, table))  # read before they are written: otherwise XLA copies the leaves
    began, ended = held["began"], held["ended"]
    real, pos = new < rows.count[:, None], rows.start[:, None] + new
    ends = real & jnp.isin(rows.tokens, jnp.asarray(rule.delimiters, jnp.int32))
    follows = lax.cummax(jnp.where(ends, pos + 1, began[:, None]), axis=1)  # where a sentence begins behind each token
    first = jnp.concatenate([began[:, None], follows[:, :-1]], axis=1)  # of the sentence each token is in
    length = pos + 1 - first
    told = ends & (length >= rule.shortest) & (length <= rule.longest)
    total = jnp.sum(told, axis=1, dtype=jnp.int32)
    lost = jnp.maximum(total - most, 0)  # more than the table holds
    number = jnp.where(told, jnp.cumsum(told, axis=1, dtype=jnp.int32) - 1 - lost[:, None], -1)
    # Every token goes where the next delimiter puts it; behind the last one, into the sentence under way (number `most`).
    closing = lax.cummin(jnp.where(ends, new, new.shape[0]), axis=1, reverse=True)
    place = jnp.take_along_axis(jnp.pad(number, [(0, 0), (0, 1)], constant_values=most), closing, axis=1)
    part = real[:, None] & (place[:, None] == jnp.arange(most + 1, dtype=jnp.int32)[:, None])
    states = jnp.where(real[..., None], hidden, 0).astype(jnp.float32)
    sums = jnp.einsum("rkt,rte->rke", part.astype(jnp.float32), states, precision=lax.Precision.HIGHEST)
    older = (place[:, :1] == jnp.arange(most + 1))[..., None]  # the sentence that was under way goes on
    sums += jnp.where(older, held["sum"][:, None], 0.0)
    slot = jnp.where(rows.count > 0, rows.slot, table["ended"].shape[0])
    k = jnp.arange(most, dtype=jnp.int32)
    at = jnp.where(k < (total - lost)[:, None], (ended + lost)[:, None] + k, -1)
    at = jnp.where(at >= 0, at % rule.sentences, rule.sentences)
    inside = part[:, :most]
    unit = sums[:, :most] / jnp.maximum(jnp.linalg.norm(sums[:, :most], axis=-1, keepdims=True), 1e-20)
    found = {
        "mean": unit.astype(table["mean"].dtype),
        "first": jnp.max(jnp.where(inside, first[:, None], 0), axis=-1),
        "end": jnp.max(jnp.where(inside, pos[:, None] + 1, 0), axis=-1),
    }
    after = {name: table[name].at[slot[:, None], at].set(x, mode="drop") for name, x in found.items()}
    under_way = {"sum": sums[:, most], "began": follows[:, -1], "ended": ended + total}
    return after | {name: table[name].at[slot].set(x, mode="drop") for name, x in under_way.items()}


def repeated(mean: Array, first: Array, end: Array, tau: float) -> dict[str, Array]:
    """Each sentence's largest cosine to a later one, 0 below tau: mean [R,N,E] -> first, end, penalty [R,N], in order of position.

    An entry that holds no sentence (end 0) comes last. One f32[R,N,N] exists at once.
    """
    real = end > 0
    like = jnp.einsum("rie,rje->rij", mean, mean, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
    later = real[:, None] & (first[:, None] > first[..., None])
    penalty = jnp.max(jnp.where(later & (like >= tau), like, 0.0), axis=-1)
    first = jnp.where(real, first, HOLE)
    order = jnp.argsort(first, axis=-1)
    return {name: jnp.take_along_axis(x, order, axis=-1) for name, x in (("first", first), ("end", end), ("penalty", penalty))}


def penalty_at(sentences: dict[str, Array], pos: Array) -> Array:
    """The penalty of the sentence that each position lies in, 0 outside: `repeated`'s result, i32[R,...] -> f32[R,...]."""
    flat = pos.reshape(pos.shape[0], -1)
    at = jax.vmap(lambda first, p: jnp.searchsorted(first, p, side="right"))(sentences["first"], flat) - 1
    end, penalty = (jnp.take_along_axis(sentences[name], jnp.maximum(at, 0), axis=1) for name in ("end", "penalty"))
    return jnp.where((at >= 0) & (flat < end), penalty, 0.0).reshape(pos.shape)


def cosines(keys: Array) -> Array:
    """[R,H,B,D] -> f32[R,H,B,B]; a key of length 0 is like nothing."""
    unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-20)
    return jnp.einsum("rhid,rhjd->rhij", unit, unit, precision=lax.Precision.HIGHEST)


def token_redundancy(keys: Array, real: Array, threshold: float) -> Array:
    """Softmax of each key's mean similarity to the others, those below the threshold and the latest later one left out.

    keys f32[R,H,B,D], real bool[R,H,B] -> f32[R,H,B].
    """
    b = jnp.arange(keys.shape[2], dtype=jnp.int32)
    like = jnp.where(real[..., None] & real[..., None, :] & (b[:, None] != b), cosines(keys), 0.0)
    like = jnp.where(like >= threshold, like, 0.0)
    latest = jnp.max(jnp.where((like > 0) & (b > b[:, None]), b, -1), axis=-1, keepdims=True)
    mean = jnp.where(b == latest, 0.0, like).sum(axis=-1) / jnp.maximum(real.sum(axis=-1, keepdims=True), 1)
    return jax.nn.softmax(jnp.where(real, mean, -jnp.inf), axis=-1, where=real)


def segment_penalty(keys: Array, real: Array, segment: int, tau: float) -> Array:
    """The largest cosine of a segment's mean key to that of a later segment, 0 below tau, for each of its tokens.

    keys f32[R,H,B,D], real bool[R,H,B], true up to some point -> f32[R,H,B].
    """
    rows, heads, width, dim = keys.shape
    split = [(0, 0), (0, 0), (0, -width % segment)]
    full = jnp.pad(jnp.where(real[..., None], keys, 0), [*split, (0, 0)]).reshape(rows, heads, -1, segment, dim)
    mean = full.sum(axis=3)  # the length is normalised away
    some = jnp.pad(real, split).reshape(rows, heads, -1, segment).any(axis=-1)
    s = jnp.arange(mean.shape[2], dtype=jnp.int32)
    like = cosines(mean)
    later = some[..., None, :] & (s > s[:, None])
    penalty = jnp.max(jnp.where(later & (like >= tau), like, 0.0), axis=-1)
    return jnp.where(real, jnp.repeat(penalty, segment, axis=-1)[..., :width], 0.0)


def final(important: Array, sentences: Array, tokens: Array, segments: Array, at: Array, rule: Rule) -> Array:
    """important, sentences f32[R,H,C] of all candidates; tokens, segments f32[R,H,B] of those at ranks i32[R,H,B] -> f32[R,H,C]."""
    none = ~jnp.any(sentences > 0, axis=-1, keepdims=True)
    less = rule.alpha * tokens + jnp.where(none, rule.weight * segments, 0.0)
    row, head = (jnp.arange(size).reshape(shape) for size, shape in ((at.shape[0], (-1, 1, 1)), (at.shape[1], (-1, 1))))
    return (important - rule.weight * sentences).at[row, head, at].add(-less, mode="drop")


def score(candidates: Candidates, repeats: dict[str, Array], rule: Rule) -> Array:
    """Candidates (whose `mass` is a softmax over the candidates alone), `repeated`'s result -> f32[R,H,C], +inf for what stays."""
    assert candidates.read is not None and candidates.mass is not None
    important = candidates.mass.max(axis=2) / jnp.maximum(candidates.window, 1)[:, None, None]
    rank = jnp.broadcast_to(jnp.arange(important.shape[-1], dtype=jnp.int32), important.shape)
    past = candidates.total - candidates.window[:, None]
    free = (rank >= rule.sinks) & (rank < past[..., None])
    told = jnp.where(free, penalty_at(repeats, candidates.read("pos", rank)), 0.0)
    at = jnp.maximum(past - rule.near, rule.sinks)[..., None] + jnp.arange(rule.near, dtype=jnp.int32)
    real = at < past[..., None]
    keys = candidates.read("keys", at).astype(jnp.float32)
    tokens = token_redundancy(keys, real, rule.threshold)
    segments = segment_penalty(keys, real, rule.segment, rule.tau)
    found = final(important, told, tokens, segments, jnp.where(real, at, rank.shape[-1]), rule)
    return jnp.where(free, found, jnp.inf)


@dataclasses.dataclass(frozen=True)
class Listening(InPlace):
    """Layer's leaves; in the last layer also rows "table" (see `empty`): what its output says, all layers hear."""

    rule: Rule

    @property
    def last(self) -> bool:
        return self.spec.index == self.spec.layers - 1

    def init(self, slots: int, pages: int, stage: bool = False) -> State:
        state = super().init(slots, pages, stage)
        if not self.last:
            return state
        return State(state.pages, state.rows | {"table": empty(slots, self.rule.sentences, self.spec.hidden, self.spec.dtype)})

    def evicting(self, retention: Retention) -> LayerMethod:
        base = super().evicting(retention)
        if not self.last:
            return base

        def after_layer(state: State, hidden: Array, carry: Any, rows: Rows) -> tuple[State, Array, Any]:
            table = listen(state.rows["table"], hidden, rows, self.rule)
            return State(state.pages, state.rows | {"table": table}), hidden, carry

        prefill, decode = (hooks._replace(after_layer=after_layer) for hooks in (base.prefill, base.decode))
        return base._replace(prefill=prefill, decode=decode)

    def scores(self, retention: Retention, parts: tuple[Part, ...], own: dict[str, Any], rows: Rows, window: Array) -> Array:
        """As Layer's, with a softmax over what lies between the sinks and the window only."""
        (part,) = parts
        pages, table = part.state.pages, part.rows.table
        queries, _ = recall(own["ring"], rows.start + rows.count, self.window)
        real = jnp.arange(self.window) >= self.window - window[:, None]
        past = part.count - window[:, None]
        view = self.storage.view(pages["kv"], ids=table, first=jnp.full_like(past, self.rule.sinks), length=past)

        def read(name: str, at: Array) -> Array:
            return self.storage.keys(pages["kv"], table, at) if name == "keys" else kernel.take(pages[name], table, at)

        seen = mass(queries, view, attend(queries, view)[1], real)
        return retention.score(Candidates(part.count, seen, window, read=read))


def skipkv(
    budget: int | None = None,
    sinks: int = 4,
    window: int = 8,
    alpha: float = 0.1,
    weight: float = 1.0,
    threshold: float = 0.8,
    tau: float = 0.95,
    near: int = 64,
    segment: int = 32,
    shortest: int = 4,
    longest: int = 256,
    sentences: int = 256,
    delimiters: tuple[int, ...] | None = None,
    period: int = 128,
    ratio: float | None = None,
    page: int = 16,
) -> Method:
    """Drop first the sentences that a later one repeats, then unimportant and redundant tokens (experimental).

    score_j = max over the group of the mean over the window of softmax(q K^T / sqrt(D))_j
    - alpha * redundancy_j (the last `near` candidates only) - weight * r(sentence of j);
    r(s) = max over later sentences t of cos(e_s, e_t) where that is >= tau, else 0; e_s = mean of the last layer's hidden states.

    Family: eviction
    Paper: Tian et al. 2025, arXiv 2512.07993.
    Differs: the paper's code is not public; what it leaves open is filled in here, so this method is experimental. No activation
        steering. Prompts have sentences too, not only answers. A span between two delimiters that is too short or too long is no
        sentence. Where no candidate of a head lies in a repeated sentence, segments of keys among the last `near` candidates take
        the sentences' place. One set per kv head. All layers are sealed after the last one, which knows the sentences: during a
        prompt the whole of it is held, in pages granted as it grows.
    Keeps: budget tokens per kv head and layer after a prompt or trim, at most budget + period.

    Args:
        budget: tokens kept per kv head and layer, sinks and window included (default 4096, where ratio is not given).
        sinks: first tokens that are always kept.
        window: latest queries that judge importance; their tokens always stay. It starts anew with each prompt.
        alpha: weight of token redundancy.
        weight: weight of sentence (or segment) redundancy.
        threshold: cosine from which on two keys are similar.
        tau: cosine from which on a sentence, or segment, repeats another.
        near: candidates, the latest ones, whose keys are compared: one near x near matrix per kv head exists at once.
        segment: tokens a segment of keys.
        shortest: tokens of the shortest sentence that counts.
        longest: tokens of the longest.
        sentences: latest sentences that are remembered, with one hidden state each.
        delimiters: ids of the tokens that end a sentence (default: the tokenizer's line ends, with punctuation or without).
        period: decoded tokens between trims; 0: none while decoding.
        ratio: instead of a budget: the fraction of the session's tokens that is kept, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 4096)
    check(sinks >= 0 and window >= 1, f"sinks={sinks} must be >= 0 and window={window} at least 1")
    short = f"budget={budget} leaves nothing beside window={window} and sinks={sinks}; give a larger budget"
    check(budget is None or budget > window + sinks, short)
    check(period >= 0, f"period={period} must be at least 1 step, or 0 for none")
    delimiters = None if delimiters is None else tuple(delimiters)
    rest: dict[str, Any] = dict(sinks=sinks, alpha=alpha, weight=weight, threshold=threshold, tau=tau, near=near, segment=segment)
    rest |= dict(shortest=shortest, longest=longest, sentences=sentences, delimiters=delimiters)
    arguments: dict[str, Any] = dict(budget=budget, window=window, **rest, period=period, ratio=ratio, page=page)
    rule = checked(Rule(**rest))

    def retention(spec: LayerSpec) -> Retention:
        check(delimiters is not None, NEEDS)
        most, at = amount(budget, ratio, spec)
        judge = lambda c, repeats: score(c, repeats, rule)  # noqa: E731
        return Retention(most, max(period, 1), window, judge, restart=True, budget_at=at, endless=period == 0)

    def joint(states: tuple[State, ...], rows: tuple[Rows, ...]) -> dict[str, Array]:
        mean, first, end = (of_slot(states[-1].rows["table"][name], rows[-1]) for name in ("mean", "first", "end"))
        return repeated(mean, first, end, tau)

    def fit(model: Any) -> Method:
        check(model.tokenizer is not None, NEEDS)
        found: dict[str, Any] = {"delimiters": delimiters_of(model.tokenizer)}
        return skipkv(**arguments | found)

    kind, later = functools.partial(Listening, rule=rule), None if delimiters else fit
    return composed("skipkv", arguments, raw(page), retention, None, LOCAL_SETS, kind, in_place=True, joint=joint, fit=later)


NEEDS = "delimiters must be given, the ids of tokens that end a sentence: there is no tokenizer to find them with"
