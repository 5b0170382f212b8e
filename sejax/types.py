"""The contract between the engine, a method and the kernels: plain pytrees and records of pure functions.

Axis letters, used everywhere: R rows of a call, T new tokens, S slots, H kv heads, G query heads per kv head,
D head size, N pages, M listed ids, P page size (tokens), L layers, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import jax
from flax import struct

Array = jax.Array
PyTree = Any

HOLE = 2**30
"""Position stored for a row that holds no token: larger than any real position, so causal masks drop it."""


class State(NamedTuple):
    """What one layer keeps. Every leaf of `pages` has the page axis first, every leaf of `rows` the slot axis."""

    pages: PyTree
    rows: PyTree


class Rows(NamedTuple):
    """The sequences one call touches. A padding row has slot S and page ids N: gathers clamp, scatters drop.

    slot i32[R]; start i32[R] logical tokens before this call; count i32[R] new tokens of this call (0: the row is idle);
    table i32[R,M] page ids of the row's run; tokens i32[R,T] token ids; turn i32[R,2] first position of the prompt that a
    prefill chunk belongs to and the one behind its last (None: the call is all of it).
    """

    slot: Array
    start: Array
    count: Array
    table: Array
    tokens: Array
    turn: Array | None = None


class Qkv(NamedTuple):
    """Projections of one layer. q, q_raw [R,T,H,G,D]; k, v, k_raw [R,T,H,D]; raw: before RoPE (after any q/k norm)."""

    q: Array
    k: Array
    v: Array
    q_raw: Array
    k_raw: Array


class Seen(NamedTuple):
    """What attention returns. out [R,T,H,G,D]; lse f32[R,T,H,G] (natural log); mass: for each view f32[R,H,G,C] or None.

    C is the number of listed tokens (M * run). Mass is the probability a listed token received, summed over the call's
    real queries, relative to the merged lse.
    """

    out: Array
    lse: Array
    mass: tuple[Array | None, ...] = ()


class AttentionView(struct.PyTreeNode):
    """A description of what a query may read: which rows of which pool, under which mask. Nothing is gathered yet.

    An entry e of `ids` names `run` consecutive tokens; sub = P // run pieces make a page. With ids [R,M] the entry means
    page e // sub, piece e % sub, the same for all kv heads. With ids [R,H,M] it means head page e // sub (page * H + head),
    piece e % sub. Listed token j of a row is token j % run of entry j // run. Ids out of range are clamped, never followed.
    """

    k: Array  # [N,H,P,D]
    v: Array  # [N,H,P,Dv]
    ids: Array  # i32[R,M] or i32[R,H,M]
    length: Array  # i32[R] or i32[R,H]: listed tokens [first, length) count
    first: Array | None = None  # i32[R] or i32[R,H]
    own: Array | None = None  # i32[R]: the last `own` listed tokens are this call's, query t sees those up to its own
    pos: Array | None = None  # i32[N,H,P] true positions; with q_pos: causal (and window) by position
    q_pos: Array | None = None  # i32[R,T]
    bias: Array | None = None  # f32[R,H,C] added to the logits
    q: Array | None = None  # [R,T,H,G,D] queries to use instead of the layer's
    run: int = struct.field(pytree_node=False, default=16)
    scale: float | None = struct.field(pytree_node=False, default=None)  # default D ** -0.5
    softcap: float | None = struct.field(pytree_node=False, default=None)
    window: int | None = struct.field(pytree_node=False, default=None)  # sees positions > q_pos - window
    mass: bool = struct.field(pytree_node=False, default=False)


Kind = Literal["attention", "window", "mla", "shared", "recurrent"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a method may know of a layer."""

    index: int
    layers: int  # layers in the model
    heads: int  # H, kv heads
    group: int  # G, query heads per kv head
    head_dim: int  # D
    dtype: Any  # of stored keys and values
    rope: Callable[[Array, Array], Array]  # (x [..., T, *, D] broadcastable, positions) -> rotated x; see models.rope
    kind: Kind = "attention"
    hidden: int = 0  # E, size of the hidden state
    max_len: int = 0  # tokens a sequence may have; 0: not said


def _pass(state: State, qkv: Any, seen: Any, carry: Any, rows: Any) -> tuple[State, Any]:
    return state, carry


def _pass_layer(state: State, hidden: Any, carry: Any, rows: Any) -> tuple[State, Any, Any]:
    return state, hidden, carry


class Hooks(NamedTuple):
    """One layer in one phase (prefill chunk or decode step). All functions are pure; none reads a value on the host."""

    init: Callable[[int, int], State]  # (slots, pages) -> zeros, each leaf its own buffer
    write: Callable[[State, Qkv, Rows], State]  # store the new tokens
    before_attention: Callable[[State, Qkv, Any, Rows], tuple[tuple[AttentionView, ...], Any]]  # -> (views, carry)
    after_attention: Callable[[State, Qkv, Seen, Any, Rows], tuple[State, Any]] = _pass
    after_layer: Callable[[State, Array, Any, Rows], tuple[State, Array, Any]] = _pass_layer
    after_step: Callable[..., State] | None = None  # (State, Rows) -> State: trims; decode: only rows that are `due` change
    attend: Callable[[Array, tuple[AttentionView, ...], Rows], Seen] | None = None  # (q, views, rows); None: over all they list


class Passes(NamedTuple):
    """What is run through the model once more when a session's first prompt is stored, before its layers are sealed.

    width(longest) -> tokens of a padded input, static, where prompts have at most `longest` tokens;
    number(tokens i32[T], length) -> how many inputs a prompt has (tokens of numpy: on the host; below 0: none);
    input(index, tokens i32[T], length) -> (ids i32[width(T)], how many of them are real, carry: data for the `replay` hooks).
    """

    width: Callable[[int], int]
    number: Callable[[Any, Any], Any]
    input: Callable[[Any, Array, Any], tuple[Array, Array, Any]]


class LayerMethod(NamedTuple):
    """One layer of a method.

    order "chunk": prefill writes the decode state in place; `seal` is None or (State, Rows) -> State. Where the method has a
    `joint`, seal and decode.after_step take its result as a last argument.
    order "layer": prefill writes a stage (a State of prefill.init), reads older turns through `history`, then
    seal(stage, State, staged Rows, old Rows, new Rows) -> State stores what is kept into the new rows' slot: staged names
    the stage's rows, old the sequence as it was (slot S: nothing held), new where it goes (every rows leaf of that slot is
    written). Old and new may name the same slot. start and count of all three: this turn's first position and tokens.
    """

    prefill: Hooks
    decode: Hooks
    run: Callable[[int], int]  # max_len -> token rows a slot needs
    stage_run: Callable[[int], int]  # max_len -> token rows of a prefill stage
    page: int  # P
    held: Callable[[State, Rows], Array]  # -> i32[R,H,rows] logical positions, -1 empty
    history: Callable[[State, Qkv, Rows], tuple[AttentionView, ...]] | None = None
    seal: Callable[..., State] | None = None
    due: Callable[[State, Rows], Array] | None = None  # -> bool[R]: decode.after_step must run before the next token
    truncate: Callable[[State, Rows], State] | None = None  # drop tokens at positions >= rows.start
    replay: Hooks | None = None  # the method's `passes` go through these: they may change scores, and leave no other trace
    used: Callable[[State, Rows], Array] | None = None  # -> i32[R]: pages that a first prompt still needs once it is sealed
    room: Callable[[int], int] | None = None  # token rows -> pages, where an index beside them needs more than they do

    def pages(self, rows: int) -> int:
        """Pages that `rows` token rows need; never fewer for more rows."""
        return self.room(rows) if self.room else -(-rows // self.page)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Method:
    """A KV-cache method: static and hashable, equal by name and arguments, which are also its fingerprint.

    joint: (every layer's State, every layer's Rows) -> what the seals and trims of all layers share, [R,...]; it runs before the
    first of them (order "chunk" only: no layer is sealed before all have seen the prompt).
    passes: see Passes (order "chunk" only).
    fit: model (its config, its tokenizer) -> this method with the arguments that belong to the model filled in.
    """

    name: str
    arguments: tuple[tuple[str, Hashable], ...]
    layer: Callable[[LayerSpec, Any], LayerMethod] = dataclasses.field(compare=False, repr=False)
    order: Literal["chunk", "layer"] = dataclasses.field(default="chunk", compare=False)
    growing: bool = dataclasses.field(default=False, compare=False)  # pages are granted as the sequence grows
    parts: Any = dataclasses.field(default=None, compare=False, repr=False)  # cache.method.Parts, for combining two methods
    joint: Callable[[tuple[State, ...], tuple[Rows, ...]], Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    passes: Passes | None = dataclasses.field(default=None, compare=False, repr=False)
    fit: Callable[[Any], Method] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.joint or self.passes) and self.order != "chunk":
            raise ValueError(f"{self.name}: joint and passes need all layers unsealed: give the method order='chunk'")

    def fitted(self, model: Any) -> Method:
        """The method to use with this model; ValueError where an argument must be given and the model does not tell it."""
        return self.fit(model) if self.fit else self

    def __str__(self) -> str:
        shown = ",".join(f"{k}={v}" for k, v in self.arguments)
        return f"{self.name}:{shown}" if shown else self.name
