"""A Gaussian model of coming queries (METHODS 0 and 4.9)."""

import numpy as np

from tests.oracles.transformer import Evicting, rope, softmax


def mean_rotation(first: int, count: int, dim: int) -> np.ndarray:
    return np.mean([rope(np.eye(dim), p).T for p in range(first, first + count)], axis=0)


class Oracle(Evicting):
    def score(self, head: int, window: int) -> np.ndarray:
        held = self.kept[head]
        result = np.full(len(held), np.inf)
        if len(held) <= self.sinks:
            return result
        keys, values = (np.stack([x[p][head] for p in held])[self.sinks :] for x in (self.k, self.v))
        queries = np.stack([self.q_raw[p][head] for p in sorted(self.q_raw) if p >= self.sinks])  # [N,G,D]
        dim = keys.shape[-1]
        turn = mean_rotation(len(self.k), self.future, dim)
        seen = []
        for g in range(queries.shape[1]):
            mean = queries[:, g].mean(0)
            spread = (queries[:, g] - mean).T @ (queries[:, g] - mean) / len(queries)
            logits = keys @ (turn @ mean) / np.sqrt(dim)
            if self.covariance:
                logits = logits + np.einsum("cd,de,ce->c", keys, turn @ spread @ turn.T, keys) / (2 * dim)
            seen.append(softmax(logits))
        weight = np.linalg.norm(values, axis=-1) if self.vnorm else 1.0
        result[self.sinks :] = (np.mean(seen, axis=0) + self.epsilon) * weight
        return result
