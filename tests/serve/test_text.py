"""TextStream: stop strings (WIRE P02) and UTF-8 over tokens (P03), against a plain oracle on random texts."""

from __future__ import annotations

import random

import pytest

from sejax.serve.text import TextStream


class Pieces:
    """A tokenizer whose ids are indices into given pieces."""

    def __init__(self, *pieces: str | bytes):
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def token_bytes(self, id: int) -> bytes:
        return self.pieces[id]


def run(pieces, stop=()):
    stream, deltas = TextStream(Pieces(*pieces), tuple(stop)), []
    for id in range(len(pieces)):
        text, stopped = stream.push([id])
        deltas.append(text)
        if stopped:
            break
    return deltas, stream.finish(), stream


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [
        (["AB", "DEF", "G", "HI", "JK"], ["DEFGHIJ"], "AB", True),
        (["x", "DE", "Fz"], ["DEFGHIJ"], "xDEFz", False),
        (["\n", "Obs", "erv", "ation:"], ["\nObservation:"], "", True),
        (["a", "bcd"], ["bc", "abcd"], "", True),  # both complete in one token: the earlier start wins
        (["xaab", "aabx"], ["aabaabx"], "x", True),
        (["aaa", "aab"], ["aab"], "aaa", True),
        (["one\n", "two"], ["\n"], "one", True),
        (["é", "ê"], ["ê"], "é", True),
    ],
)
def test_stop_strings(pieces, stop, text, stopped):
    deltas, rest, stream = run(pieces, stop)
    assert "".join(deltas) + rest == text
    assert stream.stopped is stopped


def test_holds_only_what_may_become_a_stop_string():
    deltas, rest, _ = run(["x", "D", "E", "z", "DE"], ["DEF"])
    assert (deltas, rest) == (["x", "", "", "DEz", ""], "DE")


def test_characters_over_tokens():
    deltas, rest, _ = run([bytes([b]) for b in "a👋é".encode()])
    assert (deltas, rest) == (["a", "", "", "", "👋", "", "é"], "")


def test_cut_in_a_character_and_invalid_bytes():
    assert run([b"a", b"\xf0", b"\x9f"])[:2] == (["a", "", ""], "\ufffd")
    assert run([b"a", b"\xff", b"b"])[:2] == (["a", "\ufffd", "b"], "")
    assert run([b"\xf0\x9f", b"ok"])[:2] == (["", "\ufffdok"], "")
    assert run([bytes([b]) for b in "👩‍💻".encode()])[1] == ""


def test_committed_counts_ids_whose_text_is_out():
    stream = TextStream(Pieces("ab", "cS", "TO", "P", b""), ("STOP",))
    seen = [(stream.push([id]), stream.committed, stream.consumed) for id in range(4)]
    assert seen == [(("ab", False), 1, 1), (("c", False), 1, 2), (("", False), 1, 3), (("", True), 1, 4)]
    assert stream.push([4]) == ("", True)
    assert stream.consumed == 4
    stream = TextStream(Pieces("ab", b"\xc3", b"\xa9", b"", b"\xf0"))
    assert [(stream.push([id])[0], stream.committed) for id in range(5)] == [("ab", 1), ("", 1), ("é", 3), ("", 4), ("", 4)]
    assert (stream.finish(), stream.committed) == ("\ufffd", 5)
    assert stream.finish() == ""


def oracle(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    text = ""
    for piece in pieces:
        text += piece
        starts = [at for s in stops if (at := text.find(s)) >= 0]
        if starts:
            return text[: min(starts)], True
    return text, False


def test_random_texts_match_the_oracle():
    dice = random.Random(0)
    for _ in range(2000):
        word = lambda most: "".join(dice.choice("abé") for _ in range(dice.randint(1, most)))  # noqa: E731
        pieces, stops = [word(3) for _ in range(dice.randint(1, 12))], [word(5) for _ in range(dice.randint(0, 4))]
        deltas, rest, stream = run(pieces, stops)
        text, stopped = oracle(pieces, stops)
        assert ("".join(deltas) + rest, stream.stopped) == (text, stopped), (pieces, stops)
        ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
        assert stream.committed == sum(end <= len(text) for end in ends)
        whole = TextStream(Pieces(*pieces), tuple(stops))
        assert whole.push(range(len(pieces)))[0] + whole.finish() == text  # many ids at once: the same


def test_random_bytes_match_one_decode():
    dice = random.Random(1)
    for _ in range(500):
        pieces = [bytes(dice.choice(b"a\xc3\xa9\xf0\x9f\x91\x8b\xff") for _ in range(dice.randint(1, 3))) for _ in range(8)]
        deltas, rest, stream = run(pieces)
        assert "".join(deltas) + rest == b"".join(pieces).decode(errors="replace")
        assert stream.committed == len(pieces)
