"""Prompts read by tiles and blocks (METHODS 0, 7.3 and the reference's version 2)."""

from typing import Any

import numpy as np

from tests.oracles.transformer import Evicting, Layer, New, softmax


class Oracle(Layer):
    reads_prompts = True
    block: int
    last: int

    def read_prompt(self, new: New) -> np.ndarray:
        return self.read_tiles(self, new)

    def read_tiles(self, host: Any, new: New) -> np.ndarray:
        """Attention of a prompt over what `host` holds -> [T,H,G,D]; its queries come in calls of `call` tokens."""
        start, end, group = int(new.pos[0]), int(new.pos[-1]) + 1, new.q.shape[2]
        width = self.tile if self.per_query_head else max(1, self.tile // group)
        out = np.zeros_like(new.q)
        for begin in range(start, end, self.call):
            call = range(begin, min(begin + self.call, end))
            for number in sorted({p // width for p in call}):
                places = [p for p in call if p // width == number]
                whole = number > (end - 1) // width - self.last or end - start <= self.shortest
                for h in range(self.heads):
                    if whole:
                        for p in places:
                            out[p - start, h] = host.output(h, new.q[p - start, h], p, host.kept[h])
                        continue
                    for g in [[g] for g in range(group)] if self.per_query_head else [list(range(group))]:
                        queries = new.q[[p - start for p in places], h][:, g]
                        out[places[0] - start : places[-1] - start + 1, h, g] = self.read_tile(host, h, queries, places, start)
        return out

    def read_tile(self, host: Any, h: int, queries: np.ndarray, places: list[int], start: int) -> np.ndarray:
        """queries [P,G,D] at `places` -> [P,G,D]."""
        held = host.kept[h]
        older = [p for p in held if p < start] if isinstance(host, Evicting) else []
        own = [p for p in held[len(older) :] if p <= places[-1]]
        blocks = [part[i : i + self.block] for part in (older, own) for i in range(0, len(part), self.block)]
        key = np.stack([np.mean([host.k[p][h] for p in b], axis=0) for b in blocks])
        value = np.stack([np.mean([host.v[p][h] for p in b], axis=0) for b in blocks])
        logits = queries @ key.T / np.sqrt(key.shape[-1])  # [P,G,B]
        past = [len(b) == self.block and b[-1] < places[0] for b in blocks]
        energy = np.zeros(len(blocks))
        for i, b in enumerate(blocks):
            for t, p in enumerate(places):
                if past[i] or (self.per_query_head and len(b) == self.block and b[-1] <= p):
                    energy[i] += np.exp(logits[t, :, i]).sum()
        diagonal = next(i for i, b in enumerate(blocks) if places[0] in b)
        near = range(max(diagonal - self.window, -1) + 1, len(blocks))
        keep = [not past[i] or energy[i] >= self.alpha * energy.max() or i < self.sinks or i in near for i in range(len(blocks))]
        self.sparse = getattr(self, "sparse", 0) + len(keep) - sum(keep)
        out = np.zeros_like(queries)
        for t, p in enumerate(places):
            read = [j for i, b in enumerate(blocks) if keep[i] for j in b if j <= p]
            left = [i for i in range(len(blocks)) if not keep[i]] if self.correction else []
            exact = queries[t] @ np.stack([host.k[j][h] for j in read]).T / np.sqrt(key.shape[-1])
            weight = softmax(np.concatenate([exact, logits[t][:, left] + np.log(self.block)], axis=1))
            out[t] = weight @ np.concatenate([np.stack([host.v[j][h] for j in read]), value[left]])
        return out
