"""Page ids of the pool: who owns which. Host only, no jax."""

from __future__ import annotations

from collections import deque


class Pages:
    """A free list of page ids 0..total-1. Every id is free or in exactly one run."""

    def __init__(self, total: int):
        self.total = total
        self._free = deque(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    def grant(self, count: int) -> list[int]:
        """`count` pages; IndexError if there are fewer: the caller plans with `free`."""
        return [self._free.popleft() for _ in range(count)]

    def shrink(self, ids: list[int], count: int) -> None:
        """Take back all but the first `count`."""
        self._free.extend(ids[count:])
        del ids[count:]

    def give_back(self, ids: list[int]) -> None:
        self._free.extend(ids)
        ids.clear()
