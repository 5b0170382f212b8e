"""Keep the prompt tokens that the model itself looks at while it repeats the prompt."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sejax.cache.compose import owned
from sejax.cache.method import check, composed
from sejax.cache.packed import Packed
from sejax.cache.retention import LOCAL_SETS, Retention
from sejax.cache.ring import of_slot
from sejax.cache.storage import raw
from sejax.kernels import rows as kernel
from sejax.types import Array, AttentionView, Hooks, LayerMethod, LayerSpec, Method, Passes, Qkv, Rows, Seen, State

FIRST = "\n\nWrite the whole text above once more, word for word."
NEXT = "\n\nWrite on with the text above, word for word, from the place where it says:"
BLOCK = 128  # replayed queries whose logits exist at a time
LARGEST = 0x7F7FFFFF  # bits of the largest finite float32


class Rule(NamedTuple):
    """kvzip's arguments that its layers need."""

    ratio: float
    mode: str
    sinks: int
    chunk: int
    scores: tuple[float, ...] | str | None
    rule: str


class Scores(tuple[float, ...]):
    """Head scores, layer by layer; shown by a digest of theirs."""

    def __str__(self) -> str:
        return hashlib.sha256(np.asarray(self, np.float64).tobytes()).hexdigest()[:12]


def read_scores(path: str, digest: str) -> Scores:
    """Head scores from a file that `calibrate` filled, for the model with this config digest."""
    make = "`sejax calibrate kvzip --model MODEL -o FILE` makes one"
    try:
        given = json.loads(Path(path).read_text())
        scores, made_for = Scores(float(score) for layer in given["scores"] for score in layer), given["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"scores={path} is not a file that can be read ({type(error).__name__}: {error}); {make}") from None
    check(made_for == digest, f"scores={path} was made for another model; {make}")
    return scores


def calibrate(
    trace: Callable[[Any], Any],
    texts: Sequence[Sequence[int]],
    *,
    chunk: int = 2000,
    sinks: int = 4,
    tail: int = 8,
    instruction_ids: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Score the heads, for mode "head": the largest score any token of the texts has in each; arguments as for the method.

    trace, texts: see methods.calibration. Each chunk of a text costs a dense forward pass over the text and its replay.
    """
    ids = wording(getattr(trace, "tokenizer", None)) if instruction_ids is None else instruction_ids
    made, long = passes(sinks, chunk, tail, split(ids)), [np.asarray(text, np.int32) for text in texts if len(text) > sinks]
    check(bool(long), f"texts has no piece longer than the {sinks} sinks; give longer texts")
    best: list[np.ndarray] = []
    for text in long:
        for index in range(made.number(text, len(text))):
            again, count, (first, size) = jax.device_get(made.input(index, jnp.asarray(text), len(text)))
            part, found = slice(sinks, sinks + min(chunk, len(text))), []
            row = np.arange(part.stop) - sinks  # those below 0 are the sinks
            at = np.concatenate([np.where(row < 0, row + sinks, first + row), len(text) + np.arange(len(again))])
            for _, qkv in trace([*text.tolist(), *again.tolist()]):
                keys, real, new = jnp.swapaxes(qkv.k[:, at], 1, 2), jnp.asarray(row < size)[None], jnp.full(1, count)
                found.append(probability(qkv.q[:, len(text) :], keys, part, real, new)[0].max(axis=-1))
            best.append(np.stack(jax.device_get(found)))
    scores = np.max(best, axis=0)
    return {"scores": [[round(float(score), 6) for score in layer] for layer in scores], "tokens": sum(map(len, long))}


def probability(q: Array, keys: Array, context: slice, real: Array, count: Array) -> Array:
    """The largest probability that any query, of any head of the group, gives each context key: f32[R,H,C].

    q [R,T,H,G,D], the first count i32[R] of them are asked; keys [R,H,K+T,D]: K earlier ones, `context` a slice of them, of which
    those in real bool[R,K] exist, then the queries' own. The softmax is over all of these, in fp32. Logits of BLOCK queries exist
    at a time: Hq x BLOCK x (K + T) x 4 bytes.
    """
    new, block = q.shape[1], min(q.shape[1], BLOCK)
    q = jnp.pad(q, [(0, 0), (0, -new % block), *[(0, 0)] * 3])
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    own = jnp.arange(new, dtype=jnp.int32)

    def step(i: Array, best: Array) -> Array:
        part, at = lax.dynamic_slice_in_dim(q, i * block, block, axis=1), i * block + jnp.arange(block, dtype=jnp.int32)
        logits = jnp.einsum("rthgd,rhkd->rhgtk", part, keys.astype(q.dtype), preferred_element_type=jnp.float32, precision=exact)
        causal = jnp.broadcast_to(own <= at[:, None], (q.shape[0], block, new))
        seen = jnp.concatenate([jnp.broadcast_to(real[:, None], (*causal.shape[:2], real.shape[1])), causal], axis=2)
        logits = jnp.where(seen[:, None, None], logits * q.shape[-1] ** -0.5, -jnp.inf)
        lse = jnp.max(logits, axis=-1, keepdims=True)
        lse += jnp.log(jnp.sum(jnp.exp(logits - lse), axis=-1, keepdims=True))
        found = jnp.where((at < count[:, None])[:, None, None, :, None], jnp.exp(logits[..., context] - lse), 0)
        return jnp.maximum(best, found.max(axis=(2, 3)))

    start = jnp.zeros((*keys.shape[:2], context.stop - context.start), jnp.float32)
    return lax.fori_loop(0, -(-jnp.max(count) // block), step, start)


def threshold(above: Callable[[Array], Array], most: Array, steps: Any = 31) -> Array:
    """The smallest score that at most `most` candidates exceed: the one of rank `most` from above. All as bits, i32, shape of `most`.

    Bits of floats >= 0 are ordered as the floats are. above(bits) counts the candidates with larger ones; under tensor
    parallelism this count is where the collective goes.
    """

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) // 2
        enough = above(middle) <= most
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    return lax.fori_loop(0, steps, halve, (jnp.zeros_like(most), jnp.full_like(most, LARGEST)))[1]


def candidates(state: State, rows: Rows, page: int) -> Array:
    """Bits of the scores of a first prompt's rows, not packed yet: i32[R,H,M*P], -1 for what is no candidate."""
    heads = state.pages["score"].shape[1]
    row = jnp.arange(rows.table.shape[1] * page, dtype=jnp.int32)
    score = kernel.take(state.pages["score"], rows.table, jnp.broadcast_to(row, (rows.slot.shape[0], heads, row.shape[0])))
    real = (row < of_slot(state.rows["n"], rows)[..., None]) & (score < jnp.inf)
    return jnp.where(real, lax.bitcast_convert_type(score, jnp.int32), -1)


def begins(rows: Rows) -> Array:
    """bool[R]: sequences whose first prompt this is, the only one that is compressed."""
    return (rows.start == 0) & (rows.count > 0)


def pairs_kept(rule: Rule, pairs: int, room: int) -> np.ndarray:
    """Of how many pairs' rank the threshold is, i32[room+1] by tokens: exact, because float32 counts pairs up to 2^24 only.

    pairs: layers times heads. official: by context tokens; kvpress: by all tokens of the prompt, its protected ones counted in.
    """
    total = np.arange(room + 1, dtype=np.int64) * pairs
    if rule.rule == "kvpress":
        return (total - (total * round(1 - rule.ratio, 12)).astype(np.int64)).astype(np.int32)
    return np.maximum((total * rule.ratio).astype(np.int64) - 1, 0).astype(np.int32)


def joined(rule: Rule, page: int, states: tuple[State, ...], rows: tuple[Rows, ...]) -> Any:
    """Over all layers, heads and tokens: the threshold i32[R]; kvpress also: how many at it stay in each head, i32[R,L,H]."""
    found = [candidates(*given, page) for given in zip(states, rows, strict=True)]
    heads, room = found[0].shape[1:]
    pairs, context = len(found) * heads, jnp.sum(found[0][:, 0] >= 0, axis=-1)
    table = jnp.asarray(pairs_kept(rule, pairs, room))
    length = of_slot(states[0].rows["n"], rows[0])[:, 0]
    most = table[context] if rule.rule == "official" else jnp.maximum(table[length] - pairs * (length - context), 0)
    zero = jnp.zeros_like(most)
    above = lambda bits: sum((jnp.sum(f > bits[:, None, None], axis=(1, 2), dtype=jnp.int32) for f in found), zero)  # noqa: E731
    least = threshold(above, most, jnp.where(jnp.any(begins(rows[0])), 31, 0))
    if rule.rule == "official":
        return least
    ties = jnp.stack([jnp.sum(f == least[:, None, None], axis=2, dtype=jnp.int32) for f in found], axis=1).reshape(len(least), -1)
    left = (most - above(least))[:, None] - (jnp.cumsum(ties, axis=1) - ties)
    return least, jnp.clip(left, 0, ties).reshape(-1, len(found), heads)


@dataclasses.dataclass(frozen=True)
class Zip(Packed):
    """A packed layer whose scores come from replays of the prompt, or belong to its heads."""

    rule: Rule

    def evicting(self, retention: Retention) -> LayerMethod:
        base = super().evicting(retention)
        if self.rule.ratio >= 1:
            return base
        replay = Hooks(self.init, lambda state, qkv, rows: state, self.replay, self.scored)
        return base._replace(seal=self.seal, replay=None if self.rule.scores else replay)

    def unscored(self, pos: Array) -> Array:
        if self.rule.scores is None:
            return super().unscored(pos)
        check(not isinstance(self.rule.scores, str), f"scores={self.rule.scores} belongs to a model; use method.fitted(model)")
        layers, heads, given = self.spec.layers, self.spec.heads, len(self.rule.scores)
        needs = f"a model of {layers} layers and {heads} kv heads needs {layers * heads}"
        check(given == layers * heads, f"scores has {given} numbers: {needs}")
        mine = np.asarray(self.rule.scores, np.float32).reshape(layers, heads)[self.spec.index]
        return jnp.where(pos >= self.rule.sinks, jnp.asarray(mine), jnp.inf)

    def seal(self, state: State, rows: Rows, *joint: Any) -> State:
        """Drop what is not above the threshold from a first prompt; a later one stays whole."""
        found, ties = candidates(state, rows, self.storage.page), None
        if self.rule.mode == "pair-uniform":
            room = found.shape[-1]
            most = jnp.asarray((np.arange(room + 1) * self.rule.ratio).astype(np.int32))[jnp.sum(found >= 0, axis=-1)]
            above = lambda bits: jnp.sum(found > bits[..., None], axis=-1, dtype=jnp.int32)  # noqa: E731
            least = threshold(above, most)
            ties = (most - above(least))[..., None]
        elif self.rule.rule == "kvpress":
            least, ties = joint[0][0][:, None], joint[0][1][:, self.spec.index, :, None]
        else:
            least = joint[0][:, None]
        stays, packs = (found < 0) | (found > least[..., None]), begins(rows)
        if ties is not None:  # so many at the threshold itself stay, the first ones
            equal = found == least[..., None]
            stays |= equal & (jnp.cumsum(equal, axis=-1) <= ties)
        return lax.cond(jnp.any(packs), lambda s: self.pack(s, rows, stays, packs), lambda s: s, state)

    def replay(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        """A replay's tokens see the whole prompt, and each other causally; they are never stored."""
        page = self.storage.page
        count, new = qkv.k.shape[:2]
        pages = -(-new // page)

        def paged(x: Array) -> Array:
            x = jnp.pad(x.astype(self.spec.dtype), [(0, 0), (0, pages * page - new), (0, 0), (0, 0)])
            return jnp.swapaxes(x.reshape(count * pages, page, *x.shape[2:]), 1, 2)

        ids = jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages)
        own = AttentionView(paged(qkv.k), paged(qkv.v), ids, rows.count, own=rows.count, run=page)
        return (self.everything(state, self.placed(owned(state, rows), rows)), own), carry

    def scored(self, state: State, qkv: Qkv, seen: Seen, carry: Any, rows: Rows) -> tuple[State, Any]:
        """Score the context rows that a replay repeats; carry: the first of them and how many, both i32[R]."""
        first, size = carry
        placed, sinks = self.placed(owned(state, rows), rows), self.rule.sinks
        row = jnp.arange(min(self.rule.chunk, qkv.q.shape[1]), dtype=jnp.int32)
        system = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32), (len(first), sinks))
        listed = jnp.concatenate([system, first[:, None] + row], axis=1)
        real = jnp.concatenate([jnp.ones_like(system, bool), row < size[:, None]], axis=1)
        listed = jnp.broadcast_to(listed[:, None], (len(first), self.spec.heads, listed.shape[1]))
        old = self.storage.keys(state.pages["kv"], placed.table, listed)
        keys = jnp.concatenate([old, jnp.swapaxes(qkv.k, 1, 2).astype(old.dtype)], axis=2)
        found = probability(qkv.q, keys, slice(sinks, sinks + len(row)), real, rows.count)
        asked = (row < size[:, None]) & (rows.count > 0)[:, None]
        where = jnp.broadcast_to(jnp.where(asked, first[:, None] + row, -1)[..., None], (*asked.shape, self.spec.heads))
        score = kernel.put(state.pages["score"], placed.table, where, jnp.swapaxes(found, 1, 2))
        return State(state.pages | {"score": score}, state.rows), carry


def context_of(tokens: Any, length: Any, sinks: int, turn: tuple[int, ...], ending: int) -> tuple[Any, Any]:
    """First and end of what may be dropped of a prompt i32[T]: between its first user turn's header `turn` and its last user turn.

    A prompt of one user turn is all context but its `ending` tokens, which ask for the answer; one of none, all behind the sinks.
    """
    starts = tokens.shape[0] - len(turn) + 1
    if not turn or starts < 1:
        return sinks, length
    xp = np if isinstance(tokens, np.ndarray) else jnp  # on the host nothing is compiled
    at = xp.arange(starts, dtype=np.int32)
    found = at + len(turn) <= length
    for i, id in enumerate(turn):
        found &= tokens[i : i + starts] == id
    first, last = xp.min(xp.where(found, at + len(turn), starts + len(turn))), xp.max(xp.where(found, at, -1))
    stop = xp.where(last < first, length - ending, last)  # the last one is the first
    return xp.where(last < 0, sinks, xp.maximum(first, sinks)), xp.where(last < 0, length, stop)


def passes(sinks: int, chunk: int, tail: int, wording: tuple[tuple[int, ...], ...], turn: tuple[int, ...] = ()) -> Passes:
    """Replays of a prompt's context, `chunk` tokens at a time: [instruction, last tokens of the chunk before, postfix, chunk]."""
    first, later, end = wording
    tail = min(tail, chunk)
    heads = ([*first, *end], [*later, *[-1] * tail, *end])
    longest = max(map(len, heads))
    before = np.asarray([[*head, *[-1] * (longest - len(head))] for head in heads], np.int32).reshape(2, longest)
    sizes = np.asarray([len(head) for head in heads], np.int32)

    def number(tokens: Any, length: Any) -> Any:
        begin, stop = context_of(tokens, length, sinks, turn, len(end))
        return (stop - begin + chunk - 1) // chunk

    def made(index: Any, tokens: Array, length: Any) -> tuple[Array, Array, Any]:
        kind = jnp.minimum(index, 1)
        begin, stop = context_of(tokens, length, sinks, turn, len(end))
        begin += index * chunk
        size, head = jnp.clip(stop - begin, 0, chunk), jnp.asarray(sizes)[kind]
        at = jnp.arange(longest + min(chunk, tokens.shape[0]), dtype=jnp.int32)
        given = jnp.pad(jnp.asarray(before)[kind], (0, len(at) - longest), constant_values=-1)
        source = jnp.where(at < head, begin - tail + at - len(later), begin + at - head)
        told = (at < head) & (given >= 0)
        ids = jnp.where(told, given, tokens[jnp.clip(source, 0, tokens.shape[0] - 1)])
        return ids, head + size, (jnp.reshape(begin, 1), jnp.reshape(size, 1))

    return Passes(lambda length: longest + min(chunk, length), number, made)


def split(ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """(first instruction, later instruction, postfix) from ids parted by -1; what is missing: as the first, and nothing."""
    ends = [-1, *[i for i, id in enumerate(ids) if id == -1], len(ids)]
    parts = [tuple(ids[a + 1 : b]) for a, b in itertools.pairwise(ends)]
    check(len(parts) <= 3 and all(id >= -1 for id in ids), f"instruction_ids={ids} must be ids >= 0 in at most 3 parts, parted by -1")
    return (parts[0], parts[min(1, len(parts) - 1)], parts[2] if len(parts) == 3 else ())


@functools.lru_cache(maxsize=8)
def wording(tokenizer: Any) -> tuple[int, ...]:
    """The instructions and the template's turn from user to assistant, as instruction_ids."""
    check(tokenizer is not None, "kvzip asks the model to repeat its prompt, but it has no tokenizer: give instruction_ids=(id,id,...)")
    mark, told = "REPEAT-HERE", tokenizer.chat_template is not None
    end = tokenizer.render([{"role": "user", "content": mark}]).rpartition(mark)[2] if told else "\n"
    first, later, end = (tokenizer.encode(text) for text in (FIRST, NEXT, end))
    return (*first, -1, *later, -1, *end)


@functools.lru_cache(maxsize=8)
def header(tokenizer: Any) -> tuple[int, ...]:
    """Ids with which the chat template begins a user turn, but for white space: that may merge with what is said. () without one."""
    if tokenizer is None or tokenizer.chat_template is None:
        return ()
    says = [{"role": role, "content": mark} for role, mark in (("user", "ONE-HERE"), ("assistant", "TWO-HERE"), ("user", "THREE-HERE"))]
    alone = tokenizer.render(says[:1]).partition("ONE-HERE")[0]
    among = tokenizer.render(says).partition("TWO-HERE")[2].partition("THREE-HERE")[0]
    same = zip(reversed(tokenizer.encode(alone.rstrip())), reversed(tokenizer.encode(among.rstrip())))
    return tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], same))[::-1]


def kvzip(
    ratio: float = 0.3,
    mode: Literal["pair", "pair-uniform", "head"] = "pair",
    sinks: int = 4,
    chunk: int = 2000,
    tail: int = 8,
    instruction_ids: tuple[int, ...] | None = None,
    turn_ids: tuple[int, ...] | None = None,
    scores: tuple[float, ...] | str | None = None,
    rule: Literal["official", "kvpress"] = "official",
    page: int = 16,
) -> Method:
    """Compress the first prompt once, for any later question: keep what the model reads while it repeats the prompt.

    s_j = max over the group and all queries of a replay of softmax(q [K_sinks, K_chunk, K_replay]^T / sqrt(D))_j, for the tokens j
    of the chunk that is replayed on top of the whole cache; keep the pairs of (layer, kv head, token) with s above the score of
    rank int(ratio N) among all N.

    Family: eviction
    Paper: Kim et al. 2025, arXiv 2505.23416.
    Differs: softmax in fp32. Protected are the first `sinks` tokens and, where turns can be told apart (turn_ids), what stands before
        the first user turn and from the last one on; of a single user turn only the end that asks for the answer. Only the first prompt
        is compressed: what later turns add stays. Cost: each prompt token is run once more, in units of `chunk` tokens a layer, about
        the prefill's own time. Pages are dealt by head, so that a layer needs what its heads keep in the mean; all layers share one
        table, so the layer that keeps most decides how many pages are given back. Scores stay beside their rows, for pruning.
    Keeps: what is protected, and int(ratio N) - 1 of the first prompt's N other pairs (ties at the threshold drop); all later tokens.

    Args:
        ratio: fraction kept of the pairs that are not protected; 1 or more keeps all and replays nothing.
        mode: "pair": one threshold over all layers and heads; "pair-uniform": the int(ratio T) best tokens of each head; "head": no
            replays, each head has a score, and heads keep all or nothing but the sinks (usual ratio .6).
        sinks: first tokens, never dropped.
        chunk: context tokens a replay repeats.
        tail: last tokens of the chunk before, with which an instruction says where to begin.
        instruction_ids: ids of the wording for the first chunk, for later ones, and of what follows it, parted by -1 (default: English).
        turn_ids: token ids with which a user turn begins (default: the chat template's, where it also words the instruction).
        scores: for mode "head": a file made by `sejax calibrate kvzip`, or the numbers, layer by layer.
        rule: "official", or "kvpress": exactly int((1 - ratio) N) pairs are dropped, sinks counted in N, ties by order.
        page: tokens a page of the pool.
    """
    check(ratio > 0, f"ratio={ratio} must be above 0: the fraction of the prompt that is kept")
    check(mode in ("pair", "pair-uniform", "head"), f'mode={mode!r} must be "pair", "pair-uniform" or "head"')
    check(rule in ("official", "kvpress"), f'rule={rule!r} must be "official" or "kvpress"')
    check(rule == "official" or mode == "pair", f'rule="kvpress" is a rule over pairs; leave it out, or mode={mode!r}')
    check(sinks >= 0 and chunk >= 1 and tail >= 0, f"sinks={sinks} and tail={tail} must be >= 0, and chunk={chunk} at least 1")
    turns = f'turn_ids={turn_ids} must be ids >= 0, of replayed prompts; leave it out for the template\'s, or with mode="head"'
    check(turn_ids is None or (mode != "head" and min(turn_ids, default=0) >= 0), turns)
    check((scores is not None) == (mode == "head"), f"mode={mode!r} with scores={scores}: scores go with mode=head, and it needs them")
    if scores is not None and not isinstance(scores, str):
        check(min(scores, default=-1) >= 0, "scores must be numbers >= 0, one for each layer and kv head")
        scores = Scores(scores)
    arguments: dict[str, Any] = dict(ratio=ratio, mode=mode, sinks=sinks, chunk=chunk, tail=tail, instruction_ids=instruction_ids)
    arguments |= dict(turn_ids=turn_ids, scores=scores, rule=rule, page=page)
    told = Rule(ratio, mode, sinks, chunk, scores, rule)
    replays = ratio < 1 and mode != "head"

    def retention(spec: LayerSpec) -> Retention:
        return Retention(0, 0, 0, lambda c: c.read("score"))  # the layout seals: no budget, no slack, no window

    def fit(model: Any) -> Method:
        found: dict[str, Any] = {"scores": read_scores(scores, model.config.digest)} if isinstance(scores, str) else {}
        if not found:
            found |= {"instruction_ids": wording(model.tokenizer), "turn_ids": header(model.tokenizer) if turn_ids is None else turn_ids}
        return kvzip(**arguments | found)

    shared = functools.partial(joined, told, page) if ratio < 1 and mode != "pair-uniform" else None
    again = passes(sinks, chunk, tail, split(instruction_ids), turn_ids or ()) if replays and instruction_ids is not None else None
    later = fit if isinstance(scores, str) or (replays and instruction_ids is None) else None
    kind = lambda spec, storage, keeps, reads: Zip(spec, storage, keeps, reads, told)  # noqa: E731
    return composed("kvzip", arguments, raw(page), retention, None, LOCAL_SETS, kind, in_place=True, joint=shared, passes=again, fit=later)
