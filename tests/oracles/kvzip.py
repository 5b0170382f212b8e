"""The prompt is replayed chunk by chunk on top of itself; pairs of (layer, head, token) above one threshold stay (METHODS 0 and 5)."""

import numpy as np

from tests.oracles.transformer import Layer, New, softmax


def chunk_scores(q: np.ndarray, system: np.ndarray, context: np.ndarray, own: np.ndarray) -> np.ndarray:
    """q [n,G,D] of one kv head, its keys [*,D] -> the largest probability any query gives each context key."""
    found = np.zeros(len(context))
    for t in range(len(q)):
        keys = np.concatenate([system, context, own[: t + 1]])
        seen = softmax(q[t] @ keys.T / np.sqrt(q.shape[-1]))
        found = np.maximum(found, seen[:, len(system) : len(system) + len(context)].max(0))
    return found


def worded(ids: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
    """First instruction, later instruction, postfix."""
    parts: list[list[int]] = [[]]
    for i in ids:
        parts = [*parts, []] if i == -1 else [*parts[:-1], [*parts[-1], i]]
    return parts[0], parts[min(1, len(parts) - 1)], parts[2] if len(parts) > 2 else []


def span(tokens: list[int], sinks: int, ids: tuple[int, ...], turn: tuple[int, ...] | None) -> tuple[int, int]:
    """First context token and one behind the last."""
    at = [i for i in range(len(tokens)) if turn and tuple(tokens[i : i + len(turn)]) == tuple(turn)]
    if not at or not turn:
        return sinks, len(tokens)
    return max(sinks, at[0] + len(turn)), at[-1] if len(at) > 1 else len(tokens) - len(worded(ids)[2])


def inputs(
    tokens: list[int], sinks: int, chunk: int, tail: int, ids: tuple[int, ...], turn: tuple[int, ...] | None = None
) -> list[tuple[list[int], int, int]]:
    """Replays of tokens: (ids, first context position, one behind the last)."""
    first, later, end = worded(ids)
    begin, stop = span(tokens, sinks, ids, turn)
    found = []
    for low in range(begin, stop, chunk):
        high = min(low + chunk, stop)
        head = first if low == begin else [*later, *tokens[max(low - tail, low - chunk) : low]]
        found.append(([*head, *end, *tokens[low:high]], low, high))
    return found


def pair_mask(scores: np.ndarray, ratio: float, rule: str = "official", sinks: int = 0) -> np.ndarray:
    """scores [L,H,T] -> which stay; sinks: further tokens of every head, which stay in any case."""
    flat = scores.reshape(-1)
    if rule == "kvpress":
        total = flat.size + sinks * scores.shape[0] * scores.shape[1]
        most = max(total - int(total * round(1 - ratio, 12)) - (total - flat.size), 0)
        stays = np.zeros(flat.size, bool)
        stays[np.argsort(-flat, kind="stable")[:most]] = True
        return stays.reshape(scores.shape)
    if ratio >= 1:
        return np.ones(scores.shape, bool)
    return scores > np.sort(flat)[::-1][max(int(flat.size * ratio) - 1, 0)]


def uniform_mask(scores: np.ndarray, ratio: float) -> np.ndarray:
    """The int(T ratio) best of each head, lowest index first on ties."""
    order = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1, kind="stable")
    return order < int(scores.shape[-1] * ratio)


class Oracle(Layer):
    def finish(self, layers: list[Layer], tokens: list[int], x: np.ndarray, prompt: bool) -> None:
        """Once, after the first prompt's last layer."""
        length, sinks = len(tokens), min(self.sinks, len(tokens))
        if not prompt or self is not layers[-1] or len(self.k) > length or self.ratio >= 1:
            return
        first, stop = (sinks, length) if self.mode == "head" else span(tokens, sinks, self.instruction_ids, self.turn_ids)
        if first >= stop:
            return
        scores = np.zeros((len(layers), self.heads, stop - first))
        if self.mode == "head":
            scores += np.asarray(self.scores).reshape(len(layers), self.heads, 1)
        else:
            for ids, low, high in inputs(tokens, sinks, self.chunk, self.tail, self.instruction_ids, self.turn_ids):
                pos, part = length + np.arange(len(ids)), scores[:, :, low - first : high - first]
                self.model.forward(ids, pos, lambda layer, new, low=low, high=high, part=part: layer.replay(new, low, high, part))
        self.scores_seen = scores
        uniform = self.mode == "pair-uniform"
        stays = uniform_mask(scores, self.ratio) if uniform else pair_mask(scores, self.ratio, self.rule, first + length - stop)
        for layer, mask in zip(layers, stays, strict=True):
            layer.kept = [[*range(first), *(first + np.flatnonzero(head)).tolist(), *range(stop, length)] for head in mask]

    def replay(self, new: New, low: int, high: int, scores: np.ndarray) -> np.ndarray:
        """Attention of a replay over all that is held and itself, fills scores [L,H,chunk] of this layer."""
        size, out = new.q.shape[-1], np.zeros_like(new.q)
        for h in range(self.heads):
            keys, values = (np.stack([leaf[p][h] for p in range(len(self.k))]) for leaf in (self.k, self.v))
            for t in range(len(new.pos)):
                k, v = np.concatenate([keys, new.k[: t + 1, h]]), np.concatenate([values, new.v[: t + 1, h]])
                out[t, h] = softmax(new.q[t, h] @ k.T / np.sqrt(size)) @ v
            scores[self.index, h] = chunk_scores(new.q[:, h], keys[: self.sinks], keys[low:high], new.k[:, h])
        return out
