"""Define the dialogues: generators that show prompts, get answers, and return success.

A generator may show prompts to several agents, one after another, as ``search`` does. All their
turns are one episode, so that an algorithm credits the whole tree with its outcome.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import NamedTuple


class Turn(NamedTuple):
    prompt: str
    """All that the agent sees."""
    best: str
    """What the scripted expert answers."""


Dialogue = Generator[Turn, str, bool]
"""Yields turns, gets the text that was written, returns whether the dialogue succeeded."""
KEYS = "abcdef"


def sums(rng: random.Random) -> Dialogue:
    """The sum of two digits, as two digits."""
    first, second = rng.randrange(10), rng.randrange(10)
    answer = yield Turn(f"{first}+{second}=", f"{first + second:02}")
    return answer == f"{first + second:02}"


def search(rng: random.Random) -> Dialogue:
    """A lead adds two numbers that are in a corpus, which only its workers can search."""
    corpus = {key: rng.randrange(5) for key in KEYS}
    keys = rng.sample(KEYS, 2)
    question = "+".join(keys)
    asked = yield Turn(f"lead {question}: ask ", "".join(keys))
    reports = []
    for topic in asked[:2]:
        reports.append((yield from worker(topic, corpus)))
    total = str(sum(corpus[key] for key in keys))
    answer = yield Turn(f"lead {question}: {','.join(reports)}=", total)
    return answer == total


def worker(topic: str, corpus: dict[str, int]) -> Generator[Turn, str, str]:
    """Search the corpus for a topic, and report what was found."""
    query = yield Turn(f"worker {topic}: find ", topic)
    result = f"{query}{corpus[query]}" if query in corpus else "nothing"
    return (yield Turn(f"worker {topic}: {result} is ", result[1:] if query in corpus else "0"))


Game = Callable[[random.Random], Dialogue]
GAMES: dict[str, Game] = {"sums": sums, "search": search}
