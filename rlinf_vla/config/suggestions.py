"""Suggest the keys that a misspelt key was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

MOST = 3
"""Maximum number of keys in a suggestion."""


def suggest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return up to MOST of ``known`` that ``key`` may stand for; nodes are left out.

    The first rule that matches decides: same last name, abbreviation, prefix, closest spelling. If
    any match is in the same node as ``key``, only matches of that node are returned.
    """
    nodes = {each.rpartition(".")[0] for each in known}
    names = {each: each.rpartition(".")[2] for each in known if each not in nodes}
    parent, _, last = key.rpartition(".")
    rules: tuple[Callable[[str], bool], ...] = (
        lambda each: names[each] == last,
        lambda each: abbreviates(last, names[each]),
        lambda each: any(abbreviates(last, end) for end in _ends(each)),
        lambda each: names[each].startswith(f"{last}_"),
        lambda each: bool(difflib.get_close_matches(last, [names[each]], cutoff=0.75)),
    )
    for fits in rules:
        found = [each for each in names if fits(each)]
        if found := [each for each in found if each.rpartition(".")[0] == parent] or found:
            return sorted(
                found, key=lambda each: (-difflib.SequenceMatcher(None, key, each).ratio(), each)
            )[:MOST]
    return difflib.get_close_matches(key, list(names), n=1, cutoff=0.8)


def abbreviates(short: str, name: str) -> bool:
    """Return whether ``short`` joins prefixes of all words of ``name``: lr for learning_rate."""
    return len(short) > 1 and _made_of(short.replace("_", ""), name.split("_"))


def _ends(key: str) -> list[str]:
    """Return rank, lora_rank and model_lora_rank for model.lora.rank."""
    parts = key.split(".")
    return ["_".join(parts[i:]) for i in range(len(parts))]


def _made_of(short: str, words: Sequence[str]) -> bool:
    if not words:
        return not short
    lengths = range(1, len(words[0]) + 1)
    return any(
        short.startswith(words[0][:length]) and _made_of(short[length:], words[1:])
        for length in lengths
    )
