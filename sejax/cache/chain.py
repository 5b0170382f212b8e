"""Finding a held session by its logical token prefix, whatever was physically evicted. Host only, no jax.

Ids are hashed block by block in a chain: digest_i = SHA-256(tag, digest_{i-1}, count, ids as int32 little-endian), from a
root that covers the fingerprint (model, method with all its arguments, tenant ...). Stored ids are compared on every hit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 32


class Hit(NamedTuple):
    """key of the session, and how many of its first tokens the request shares."""

    key: int
    length: int


def root(fields: Sequence[str]) -> bytes:
    """The digest all chains of one fingerprint start from: length-prefixed fields, so that no two lists collide."""
    digest = hashlib.sha256(b"sejax-chain-1")
    for field in fields:
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def digests(start: bytes, ids: np.ndarray) -> list[bytes]:
    """One digest for each whole block of ids."""
    found, parent = [], start
    for at in range(0, len(ids) - BLOCK + 1, BLOCK):
        parent = hashlib.sha256(b"block" + parent + BLOCK.to_bytes(4, "little") + ids[at : at + BLOCK].astype("<i4").tobytes()).digest()
        found.append(parent)
    return found


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


class Index:
    """Sessions by prefix. One owner, the engine thread."""

    def __init__(self, start: bytes):
        self._root = start
        self._ids: dict[int, np.ndarray] = {}
        self._path: dict[int, list[bytes]] = {}
        self._through: dict[bytes, set[int]] = {}  # digest -> sessions whose ids pass through that block

    def insert(self, key: int, ids: Sequence[int]) -> None:
        """Hold session `key` with these computed ids; a session of the same key is replaced."""
        self.remove(key)
        array = np.asarray(ids, np.int32)
        path = [self._root, *digests(self._root, array)]
        self._ids[key], self._path[key] = array, path
        for digest in path:
            self._through.setdefault(digest, set()).add(key)

    def remove(self, key: int) -> None:
        """Forget a session; unknown keys are ignored."""
        self._ids.pop(key, None)
        for digest in self._path.pop(key, ()):
            members = self._through[digest]
            members.discard(key)
            if not members:
                del self._through[digest]

    def lookup(self, ids: Sequence[int], whole: bool) -> Hit | None:
        """The session that shares the longest prefix with `ids`; with `whole`, only one whose every id is in the prefix.

        At least one id of the request is left to compute.
        """
        array = np.asarray(ids, np.int32)[:-1]
        path = [self._root, *digests(self._root, array)]
        seen: set[int] = set()
        best: Hit | None = None
        for digest in reversed(path):
            for key in self._through.get(digest, set()) - seen:
                seen.add(key)
                length = common(self._ids[key], array)
                if whole and length < len(self._ids[key]):
                    continue
                if length > 0 and (best is None or length > best.length):
                    best = Hit(key, length)
            if best is not None:
                return best  # shallower blocks share less
        return None
