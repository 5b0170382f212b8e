"""Keep everything; a few observer layers choose the prompt tokens that the layers above them read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sejax.cache.compose import Layer
from sejax.cache.method import Parts, check
from sejax.cache.retention import over_heads
from sejax.cache.ring import of_slot
from sejax.cache.storage import raw
from sejax.kernels.tokens import token_logits
from sejax.types import Array, AttentionView, Hooks, LayerMethod, LayerSpec, Method, Qkv, Rows, State


def scores(logits: Array, selector: str) -> Array:
    """One score a token from logits f32[R,H,G,C] (-inf: no candidate), the largest over all query heads -> f32[R,C]."""
    if selector == "softmax":
        some = jnp.any(logits > -jnp.inf, axis=-1, keepdims=True)
        logits = jnp.where(logits > -jnp.inf, jax.nn.softmax(jnp.where(some, logits, 0.0), axis=-1), -jnp.inf)
    return over_heads(logits.max(axis=2), "max")[:, 0]


def choose(score: Array, count: Array, most: int) -> Array:
    """The `count` best tokens, ties to the lowest index: f32[R,C], i32[R] -> ascending i32[R,most], C where there is none."""
    width = score.shape[-1]
    value, at = lax.top_k(score, min(most, width))
    real = (value > -jnp.inf) & (jnp.arange(at.shape[-1]) < count[:, None])
    return jnp.sort(jnp.where(real, at, width).astype(jnp.int32), axis=-1)


def place(layer: int, observers: tuple[int, ...], wait: int) -> str:
    """What a layer does: "observe", "follow" the nearest observer below, or read everything ("dense")."""
    if layer in observers:
        return "observe"
    below = [o for o in observers if o < layer]
    return "follow" if below and layer > max(below) + wait else "dense"


def overlap(trace: Callable[[Any], Any], ids: Sequence[int], ratio: float, queries: int, selector: str) -> np.ndarray:
    """[L,L]: of the tokens that layer l's attention ranks first, the share that layer o would choose.

    The last `queries` tokens of the text are the queries, all before them is the prompt; both sets have ratio of its tokens. The
    largest arrays are the logits of one layer, f32[queries,H,G,prompt], and the sets of all layers, f32[L,queries*prompt].
    """
    prompt = len(ids) - queries
    count, sets = int(prompt * ratio), []
    for spec, qkv in trace(ids):
        keys = qkv.k[0, :prompt].astype(jnp.float32)
        logits = jnp.einsum("rhgd,chd->rhgc", qkv.q[0, prompt:].astype(jnp.float32), keys) * spec.head_dim**-0.5
        named = [choose(scores(logits, s), jnp.full(queries, count), count) for s in (selector, "softmax")]
        sets.append([np.asarray((at[..., None] == jnp.arange(prompt)).any(axis=1), np.float32).ravel() for at in named])
    chosen, wanted = (np.stack(side) for side in zip(*sets, strict=True))
    return chosen @ wanted.T / (queries * count)


def best_observers(share: np.ndarray, number: int, wait: int, dense: int) -> tuple[int, ...]:
    """The `number` layers o_1 < o_2 < ..., o_1 <= dense, with the largest sum over layers of what they see of their attention.

    Layers that read everything count 1, others share[nearest observer below, layer]; ties go to lower layers.
    """
    layers = len(share)

    def gain(o: int, end: int) -> float:
        whole = min(o + wait + 1, end)
        return whole - o + float(share[o, whole:end].sum())

    reached: dict[int, tuple[float, tuple[int, ...]]] = {o: (float(o), (o,)) for o in range(min(dense + 1, layers))}
    for _ in range(number - 1):
        options = {p: [(value + gain(o, p), (*path, p)) for o, (value, path) in reached.items() if o < p] for p in range(layers)}
        reached = {p: max(found, key=lambda option: option[0]) for p, found in options.items() if found}
    return max(((value + gain(o, layers), path) for o, (value, path) in reached.items()), key=lambda option: option[0])[1]


def calibrate(
    trace: Callable[[Any], Any],
    texts: Sequence[Sequence[int]],
    *,
    observers: int = 3,
    ratio: float = 0.067,
    wait: int = 1,
    dense: int = 2,
    queries: int = 16,
    selector: Literal["last", "softmax"] = "last",
) -> dict[str, Any]:
    """Choose the layers that observe: those whose choice covers the attention of the layers above them best.

    observers: how many; ratio, wait, selector: as the method will be used; dense: layers below the first observer at most;
    queries: last tokens of each text that play the decoded ones. trace, texts: see methods.calibration.
    """
    check(0 < ratio <= 1, f"ratio={ratio} must lie in (0, 1]: the fraction of the prompt that is read")
    check(wait >= 0 and dense >= 0 and queries >= 1, f"wait={wait} and dense={dense} must be >= 0, queries={queries} at least 1")
    shortest = queries + int(np.ceil(1 / ratio))
    long = [ids for ids in texts if int((len(ids) - queries) * ratio) >= 1]
    check(bool(long), f"texts: none has {shortest} tokens, the fewest from which one can be chosen; give longer texts")
    share = np.mean([overlap(trace, ids, ratio, queries, selector) for ids in long], axis=0)
    check(1 <= observers <= len(share), f"observers={observers} must be between 1 and the model's {len(share)} layers")
    found = best_observers(share, observers, wait, dense)
    follows = [share[max(o for o in found if o < i), i] for i in range(len(share)) if place(i, found, wait) == "follow"]
    told = {"observers": list(found), "overlap": round(float(np.mean(follows)), 4) if follows else 1.0}
    return told | {"ratio": ratio, "wait": wait, "selector": selector, "tokens": sum(map(len, long))}


def profile(where: str, digest: str) -> tuple[int, ...]:
    """Observers of the model with this config digest: from a file, or ("auto") from those that come with sejax."""
    path = Path(__file__).parent / "profiles" / f"omnikv-{digest}.json" if where == "auto" else Path(where)
    make = "`sejax calibrate omnikv --model MODEL -o FILE` makes one for observers=FILE; or name layers, as in observers=(2,8,18)"
    check(where != "auto" or path.exists(), f"observers=auto: no profile of this model comes with sejax; {make}")
    try:
        given = json.loads(path.read_text())
        observers, made_for = tuple(int(layer) for layer in given["observers"]), given["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"observers={where} is not a profile that can be read ({type(error).__name__}: {error}); {make}") from None
    check(made_for == digest, f"observers={where} was made for another model; {make}")
    return observers


def omnikv(
    observers: tuple[int, ...] | str = "auto",
    budget: int | None = None,
    ratio: float | None = None,
    wait: int = 1,
    selector: Literal["last", "softmax"] = "last",
    page: int = 16,
) -> Method:
    """Read, in most layers, only the prompt tokens that an observer layer below them found important.

    In an observer: s_j = max over all query heads of q . k_j / sqrt(D), j in the prompt; the best tokens, one set for all heads,
    are what the layers up to the next observer read, beside every token decoded since the prompt.

    Family: selection
    Paper: Hao et al. 2025, OmniKV, ICLR 2025 (antgroup/OmniKV).
    Differs: only the selector "last" and its softmax form. All tokens stay on the device. The prompt is everything up to the last
        prompt's end: tokens decoded before it become candidates.
    Keeps: every token. Following layers read `budget` prompt tokens (or the fraction `ratio` of the prompt) and all decoded ones.

    Args:
        observers: layers that observe, those before the first read everything; or a file made by `sejax calibrate omnikv`; "auto":
            the profile of this model that comes with sejax.
        budget: prompt tokens that following layers read; give this or ratio.
        ratio: fraction of the prompt they read, rounded down (default .067 where budget is not given).
        wait: layers after each observer that still read everything.
        selector: "last": the newest query's logits; "softmax": its attention weights.
        page: tokens a page of the pool.
    """
    named = () if isinstance(observers, str) else tuple(observers)
    check(isinstance(observers, str) or len(named) > 0, "observers=() is empty; name the layers that observe, as in observers=(2,8,18)")
    check(min(named, default=0) >= 0, f"observers={observers} must be layers, counted from 0")
    check(budget is None or ratio is None, f"budget={budget} and ratio={ratio} are both given; give one of them")
    ratio = 0.067 if budget is None and ratio is None else ratio
    check(ratio is None or 0 < ratio <= 1, f"ratio={ratio} must lie in (0, 1]: the fraction of the prompt that is read")
    check(budget is None or budget >= 1, f"budget={budget} must be at least 1 token")
    check(wait >= 0, f"wait={wait} must be >= 0 layers")
    check(selector in ("last", "softmax"), f'selector={selector!r} must be "last" or "softmax"')
    arguments: dict[str, Any] = dict(observers=named or observers, budget=budget, ratio=ratio, wait=wait, selector=selector, page=page)

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        check(bool(named), f"observers={observers} belongs to a model; use method.fitted(model), or name the layers that observe")
        check(max(named) < spec.layers, f"observers={observers} names a layer that a model of {spec.layers} layers has not")
        return _Prompted(Layer(spec, raw(page), None, None), place(spec.index, named, wait), budget, ratio, selector).method()

    def fit(model: Any) -> Method:
        found: dict[str, Any] = {"observers": profile(str(observers), model.config.digest)}
        return omnikv(**arguments | found)

    parts = Parts(raw(page), traits=frozenset({"selection", "token selection"}))
    fitting = None if named else fit
    return Method("omnikv", tuple(arguments.items()), layer, "chunk", growing=True, parts=parts, fit=fitting)


@dataclasses.dataclass(frozen=True)
class _Prompted:
    """A layer that keeps everything and knows how long its prompt is: row leaf "prompt" i32[S]. The carry of a decode step is
    the set that the last observer chose: i32[R,K] positions, ascending, out of range where there is none."""

    layer: Layer
    place: str
    budget: int | None
    ratio: float | None
    selector: str

    def method(self) -> LayerMethod:
        base = self.layer.keeping()
        reads = {"observe": self.observe, "follow": self.follow, "dense": self.layer.read_all}[self.place]
        decode = Hooks(self.init, self.layer.write, reads)
        prefill = Hooks(self.init, self.layer.write, self.layer.read_all)
        return base._replace(prefill=prefill, decode=decode, seal=self.seal, truncate=self.truncate)

    def init(self, slots: int, pages: int) -> State:
        state = self.layer.init(slots, pages)
        return State(state.pages, state.rows | {"prompt": jnp.zeros(slots, jnp.int32)})

    def seal(self, state: State, rows: Rows) -> State:
        end = jnp.where(rows.count > 0, rows.start + rows.count, of_slot(state.rows["prompt"], rows))
        return State(state.pages, state.rows | {"prompt": state.rows["prompt"].at[rows.slot].set(end, mode="drop")})

    def truncate(self, state: State, rows: Rows) -> State:
        shorten = self.layer.keeping().truncate
        assert shorten
        kept = shorten(state, rows)
        prompt = jnp.minimum(of_slot(state.rows["prompt"], rows), rows.start)
        return State(kept.pages, kept.rows | {"prompt": kept.rows["prompt"].at[rows.slot].set(prompt, mode="drop")})

    def counts(self, room: int) -> np.ndarray:
        """Tokens to select for each prompt length 0..room: i32[room+1], computed in double precision."""
        length = np.arange(room + 1)
        wanted = np.full(room + 1, self.budget) if self.ratio is None else (length * self.ratio).astype(np.int64)
        return np.minimum(wanted, length).astype(np.int32)

    def observe(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        prompt, page = of_slot(state.rows["prompt"], rows), self.layer.storage.page
        counts = self.counts(rows.table.shape[1] * page)
        logits = token_logits(qkv.q[:, 0], state.pages["kv"]["k"], rows.table, prompt)
        chosen = choose(scores(logits, self.selector), jnp.asarray(counts)[prompt], max(1, int(counts.max())))
        return self.layer.read_all(state, qkv, carry, rows)[0], chosen

    def follow(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        """Two views: the chosen prompt tokens, each an entry of its own, and all tokens since the prompt."""
        page, pages = self.layer.storage.page, rows.table.shape[1]
        prompt, n = of_slot(state.rows["prompt"], rows), of_slot(state.rows["n"], rows)[:, 0]
        entry = jnp.take_along_axis(rows.table, jnp.clip(carry // page, 0, pages - 1), axis=1)
        found = jnp.sum(carry < pages * page, axis=1).astype(jnp.int32)
        view = self.layer.storage.view
        chosen = view(state.pages["kv"], ids=entry * page + carry % page, length=found, run=1)
        skipped = prompt // page  # whole pages before the first decoded token are not even listed
        at = jnp.minimum(jnp.arange(pages, dtype=jnp.int32) + skipped[:, None], pages - 1)
        ids = jnp.take_along_axis(rows.table, at, axis=1)
        since = view(state.pages["kv"], ids=ids, length=n - skipped * page, first=prompt - skipped * page)
        return (chosen, since), carry
