"""Token ids to text as they come: never half a character, never a piece of a stop string, nothing held longer than needed."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import Any


class _Matcher:
    """Knuth-Morris-Pratt over a stream; `state` is the length of the longest suffix seen that begins the stop string."""

    def __init__(self, stop: str):
        self.stop, self.state, self.back = stop, 0, [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self.back[length - 1]
            length += stop[i] == stop[length]
            self.back[i] = length

    def feed(self, text: str) -> int:
        """Characters of `text` read when the stop string was complete, 0 if it was not."""
        stop, back, state = self.stop, self.back, self.state
        for read, char in enumerate(text, 1):
            while state and char != stop[state]:
                state = back[state - 1]
            state += char == stop[state]
            if state == len(stop):
                return read
        self.state = state
        return 0


class TextStream:
    """The text of one answer. `tokenizer` needs `token_bytes(id) -> bytes`, b"" for special tokens.

    An answer stops after the first token that completes a stop string; of several, the one that starts first cuts the text.
    Bytes that are not UTF-8, and a character cut off at the end, become U+FFFD.

    stopped: a stop string was found.  consumed: ids read, the completing one included (later ones are not).
    committed: how many ids have their whole text in what was returned.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()):
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_Matcher(s) for s in stop]
        self._held = ""  # may begin a stop string
        self._decoded = self._returned = 0  # characters
        self._open = 0  # ids that end inside the character now being decoded
        self._ends: deque[int] = deque()  # where the text of each id not yet committed ends, in characters
        self.stopped = False
        self.consumed = self.committed = 0

    def push(self, ids: Iterable[int]) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string ended the answer."""
        out = []
        for id in ids:
            if self.stopped:
                break
            self.consumed += 1
            out.append(self._cut(self._decode(id)))
        return "".join(out), self.stopped

    def finish(self) -> str:
        """What was held back; call it when the answer ends."""
        if self.stopped:
            return ""
        rest = self._decoder.decode(b"", True)
        self._settle(rest)
        self._decoded += len(rest)
        text, self._held = self._held + rest, ""
        return self._give(text)

    def _decode(self, id: int) -> str:
        text = self._decoder.decode(self._bytes(id))
        self._settle(text)
        self._decoded += len(text)
        if self._decoder.getstate()[0]:
            self._open += 1
        else:
            self._ends.append(self._decoded)
        return text

    def _settle(self, text: str) -> None:
        if text and self._open:  # bytes waiting always become exactly the first new character
            self._ends.extend([self._decoded + 1] * self._open)
            self._open = 0

    def _cut(self, text: str) -> str:
        if not self._stops:
            return self._give(text)
        before, text = len(self._held), self._held + text
        starts = [before + read - len(m.stop) for m in self._stops if (read := m.feed(text[before:]))]
        self.stopped = bool(starts)
        cut = min(starts) if starts else len(text) - max(m.state for m in self._stops)
        self._held = "" if starts else text[cut:]
        return self._give(text[:cut])

    def _give(self, text: str) -> str:
        self._returned += len(text)
        while self._ends and self._ends[0] <= self._returned:
            self._ends.popleft()
            self.committed += 1
        return text
