"""Texts with facts to find again: seeded filler prose, facts between its sentences, a question and the gold answer.

Everything follows from (kind, length, seed) and the tokenizer, so no text is stored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from sejax.models import Tokenizer

PEOPLE = "the baker|a carpenter|the old ferryman|her neighbour|a travelling clerk|the schoolmaster|two apprentices|the miller"
DEEDS = "mended|carried|painted|counted|forgot|sold|borrowed|cleaned|weighed|measured|hid|admired"
THINGS = "a wooden bench|three baskets of pears|the blue shutters|an oak ladder|the copper kettle|a bundle of letters|the broken cart"
PLACES = "near the river|behind the mill|on the market square|under the chestnut trees|beside the chapel|at the edge of the woods"
TIMES = "Early in the morning|After the rain|On a quiet afternoon|Before supper|Late in autumn|When the bells rang|During the fair"
ENDS = (
    "and nobody minded|while the children watched|as it had been agreed|and then went home|although it was cold|and thought no more of it"
)
TOWNS = "Marlow|Brenford|Castelin|Dunmoor|Elverton|Farrow|Greyhill|Hollin|Ironbeck|Juniper|Kestrel|Lindale"
FACTS = {"needle": 1, "pairs": 6}
"""Kinds of text, with the number of facts in each; the question asks for one of them."""


class Case(NamedTuple):
    """context: ids up to the question; tail: question and gold answer; answer, value: ranges of the tail (the answer sentence,
    and in it the fact that had to be found)."""

    kind: str
    seed: int
    context: list[int]
    tail: list[int]
    answer: range
    value: range

    @property
    def name(self) -> str:
        return f"{self.kind}-{len(self.context)}-{self.seed}"


def case(tokenizer: Tokenizer, kind: str, length: int, seed: int) -> Case:
    """One text of exactly `length` tokens, its question and answer."""
    rng = random.Random(f"{kind} {length} {seed}")
    towns, values = rng.sample(TOWNS.split("|"), FACTS[kind]), rng.sample(range(1000, 10000), FACTS[kind])
    opening, closing = tokenizer.render([{"role": "user", "content": "\0"}]).split("\0")
    head = tokenizer.encode(f"{opening}Read this text and remember the secret numbers in it.\n\n")
    facts = [tokenizer.encode(f" The secret number of {town} is {value}.") for town, value in zip(towns, values, strict=True)]
    room = length - len(head) - sum(map(len, facts))
    body = filler(tokenizer, rng, room)
    places = sorted(rng.sample(range(len(body)), len(facts)))
    context = list(head)
    for at, sentence in enumerate(body):
        context += [token for place, fact in zip(places, facts, strict=True) if place == at for token in fact] + sentence
    asked = rng.randrange(len(towns))
    question = tokenizer.encode(f"\n\nWhat is the secret number of {towns[asked]}?{closing}")
    lead, value = tokenizer.encode(f"The secret number of {towns[asked]} is"), tokenizer.encode(f" {values[asked]}")
    end = len(question) + len(lead)
    tail = question + lead + value + tokenizer.encode(".")
    return Case(kind, seed, context, tail, range(len(question), len(tail)), range(end, end + len(value)))


def filler(tokenizer: Tokenizer, rng: random.Random, room: int) -> list[list[int]]:
    """Sentences of `room` tokens altogether; the last one is cut."""
    found: list[list[int]] = []
    for sentence in sentences(rng):
        found.append(tokenizer.encode(f" {sentence}")[:room])
        room -= len(found[-1])
        if room == 0:
            return found
    raise AssertionError


def sentences(rng: random.Random) -> Iterator[str]:
    while True:
        time, who, did, what, where, end = (rng.choice(part.split("|")) for part in (TIMES, PEOPLE, DEEDS, THINGS, PLACES, ENDS))
        yield f"{time} {who} {did} {what} {where}, {end}."
