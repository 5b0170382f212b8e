"""Sinks and recent tokens; positions inside the cache or true ones (METHODS 0 and 4.1)."""

import numpy as np

from tests.oracles.transformer import Layer, New, rope, softmax


class Oracle(Layer):
    sinks: int
    recent: int

    def token(self, new: New) -> np.ndarray:
        self.add(new)
        self.drop()
        return self.read(new)

    def read(self, new: New) -> np.ndarray:
        """Decode. "cache": literally un-rotated keys at indices 0..n-1, the query at n-1."""
        if self.positions == "true":
            return super().read(new)
        held = self.kept[0]
        index = np.arange(len(held))
        out = []
        for h in range(self.heads):
            keys = np.stack([rope(self.k[p][h], -p) for p in held])  # undo the rotation
            q = rope(new.q_raw[0, h], len(held) - 1)
            out.append(softmax(q @ rope(keys, index).T / np.sqrt(q.shape[-1])) @ np.stack([self.v[p][h] for p in held]))
        return np.stack(out)[None]

    def read_prompt(self, new: New) -> np.ndarray:
        """A sink's key meets its query at min(p, sinks + recent - 1), all others at the true distance.

        A dense prompt is dense: its own sinks too are at their true distance, only those of earlier turns are renumbered.
        """
        held, out = self.kept[0], np.empty(new.q.shape)
        start = new.pos[0] if self.prefill == "dense" else self.sinks
        renumbered = min(self.sinks, start) if self.positions == "cache" else 0
        for t, p in enumerate(new.pos.tolist()):
            seen = [j for j in held if j <= p and (self.prefill == "dense" or j < self.sinks or j > p - self.recent)]
            at = [min(p, self.sinks + self.recent - 1) if j < renumbered else p for j in seen]
            for h in range(self.heads):
                logits = [rope(new.q_raw[t, h], a) @ self.k[j][h] for a, j in zip(at, seen, strict=True)]
                out[t, h] = softmax(np.stack(logits, -1) / np.sqrt(new.q.shape[-1])) @ np.stack([self.v[j][h] for j in seen])
        return out

    def seal(self, new: New) -> None:
        self.drop()

    def drop(self) -> None:
        end = len(self.k)
        self.kept = [[p for p in held if p < self.sinks or p >= end - self.recent] for held in self.kept]
