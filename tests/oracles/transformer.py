"""A Llama-like transformer in float64 numpy, one sequence, no cache tricks: the oracles' model.

Each layer's attention is a `Layer` from another file here: it sees the new tokens' projections and answers with their attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class New(NamedTuple):
    """Tokens that arrive together. q, q_raw [T,H,G,D]; k, v, k_raw [T,H,D]; raw: before RoPE; pos [T]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_raw: np.ndarray
    k_raw: np.ndarray
    pos: np.ndarray


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rope(x: np.ndarray, pos: Any, base: float = 10000.0) -> np.ndarray:
    """Half-split rotation of x [...,D] by pos, which broadcasts against x's leading axes."""
    half = x.shape[-1] // 2
    angle = np.asarray(pos, np.float64)[..., None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


class Layer:
    """Keeps and reads everything; methods override `seal`, `trim`, `read`.

    q, k, v: by position, of every token ever seen; kept: for each kv head the ascending positions still held.
    """

    call = 10**9  # prompt tokens a prefill call

    def __init__(self, index: int, layers: int, heads: int, **arguments: Any) -> None:
        self.index, self.layers, self.heads = index, layers, heads
        self.__dict__.update(arguments)
        self.q, self.k, self.v, self.q_raw = {}, {}, {}, {}
        self.kept: list[list[int]] = [[] for _ in range(heads)]
        self.reader: Layer | None = None  # a selection that reads, at decode steps, what this layer keeps
        self.model: Any = None  # the Transformer
        self.prompter: Any = None  # what reads prompts, where they are not read as a whole

    def prompt(self, new: New) -> np.ndarray:
        self.add(new)
        out = self.prompter.read_tiles(self, new) if self.prompter else self.read_prompt(new)
        self.seal(new)
        return out

    def token(self, new: New) -> np.ndarray:
        self.add(new)
        if self.reader:
            self.reader.k, self.reader.v, self.reader.kept = self.k, self.v, self.kept
        out = (self.reader or self).read(new)
        self.trim(new)
        return out

    def add(self, new: New) -> None:
        for i, p in enumerate(new.pos.tolist()):
            self.q[p], self.k[p], self.v[p], self.q_raw[p] = new.q[i], new.k[i], new.v[i], new.q_raw[i]
            for held in self.kept:
                held.append(p)

    def weights(self, head: int, query: np.ndarray, at: int, positions: list[int]) -> np.ndarray:
        """Softmax of query [G,D] at position `at` over `positions`, 0 for those after it -> [G,C]."""
        keys = np.stack([self.k[p][head] for p in positions])
        logits = query @ keys.T / np.sqrt(query.shape[-1])
        return softmax(np.where(np.asarray(positions) <= at, logits, -np.inf))

    def output(self, head: int, query: np.ndarray, at: int, positions: list[int]) -> np.ndarray:
        return self.weights(head, query, at, positions) @ np.stack([self.v[p][head] for p in positions])

    def read(self, new: New) -> np.ndarray:
        """Attention of the new tokens over what is held -> [T,H,G,D]."""
        return np.stack([[self.output(h, new.q[t, h], p, self.kept[h]) for h in range(self.heads)] for t, p in enumerate(new.pos.tolist())])

    def read_prompt(self, new: New) -> np.ndarray:
        return Layer.read(self, new)

    def seal(self, new: New) -> None:
        """After a prompt."""

    def trim(self, new: New) -> None:
        """After a decoded token."""

    def finish(self, layers: list[Layer], tokens: list[int], hidden: np.ndarray, prompt: bool) -> None:
        """After the last layer, whose output is hidden [T,E]; layers: all of them."""


class Evicting(Layer):
    """Keeps the `budget` best of what it holds once that exceeds budget (first turn) or reaches budget + slack."""

    budget: int
    slack: int
    window: int = 0
    ratio: float | None = None

    def seal(self, new: New) -> None:
        self.evict(min(self.window, len(new.pos)), None if new.pos[0] == 0 else self.rows + max(self.slack, 1))

    def trim(self, new: New) -> None:
        if self.slack:  # 0: never while decoding
            self.evict(self.window, self.rows + self.slack)

    @property
    def rows(self) -> int:
        """Rows kept at the present logical length."""
        return max(1, int(len(self.k) * self.ratio)) if self.ratio else self.budget

    def quota(self, total: int) -> int:
        return self.rows

    def evict(self, window: int, limit: int | None) -> None:
        """limit: held rows from which on a head evicts; None: whenever it holds more than it may keep."""
        scores = self.joined([self.score(h, window) for h in range(self.heads)])
        for h, (score, held) in enumerate(zip(scores, self.kept, strict=True)):
            quota = self.quota(len(held))
            if len(held) >= (quota + 1 if limit is None else limit):
                best = np.argsort(-score, kind="stable")[:quota]
                self.kept[h] = [held[i] for i in sorted(best.tolist())]

    def joined(self, scores: list[np.ndarray]) -> list[np.ndarray]:
        return scores

    def score(self, head: int, window: int) -> np.ndarray:
        """One score for each held position of a head; inf: kept in any case."""
        raise NotImplementedError


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class Transformer:
    """params, config of a sejax model without biases; layers: one `Layer` each."""

    def __init__(self, params: dict[str, Any], config: Any, layers: list[Layer]) -> None:
        cast = lambda x: np.asarray(x, np.float64)  # noqa: E731
        self.embed, self.norm, self.config, self.layers, self.length = cast(params["embed"]), cast(params["norm"]), config, layers, 0
        self.weights = [{k: cast(v) for k, v in p.items()} for p in params["layers"]]
        for layer in layers:
            layer.model = self

    def run(self, tokens: list[int], prompt: bool) -> np.ndarray:
        """Logits [T,V] of one turn's prompt, or of one decoded token."""
        pos = self.length + np.arange(len(tokens))
        x = self.forward(tokens, pos, lambda layer, new: layer.prompt(new) if prompt else layer.token(new))
        self.length += len(tokens)
        for layer in self.layers:
            layer.finish(self.layers, tokens, x, prompt)
        return rms(x, self.norm, self.config.norm_eps) @ self.embed.T

    def forward(self, tokens: list[int], pos: np.ndarray, attend: Callable[[Layer, New], np.ndarray]) -> np.ndarray:
        """Hidden states [T,E] behind the last layer."""
        c, x = self.config, self.embed[np.asarray(tokens)]
        for p, layer in zip(self.weights, self.layers, strict=True):
            h = rms(x, p["attn_norm"], c.norm_eps)
            q_raw, k_raw, v = np.split(h @ p["qkv"].T, [c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim], axis=1)
            q_raw = q_raw.reshape(len(tokens), c.kv_heads, c.group, c.head_dim)
            k_raw, v = (x.reshape(len(tokens), c.kv_heads, c.head_dim) for x in (k_raw, v))
            new = New(rope(q_raw, pos[:, None, None]), rope(k_raw, pos[:, None]), v, q_raw, k_raw, pos)
            out = attend(layer, new)
            x = x + out.reshape(len(tokens), -1) @ p["o"].T
            h = rms(x, p["mlp_norm"], c.norm_eps)
            gate, up = np.split(h @ p["gate_up"].T, 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down"].T
        return x
