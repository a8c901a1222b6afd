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
    nodes = {name.rpartition(".")[0] for name in known}
    names = {name: name.rpartition(".")[2] for name in known if name not in nodes}
    parent, _, last = key.rpartition(".")
    rules: tuple[Callable[[str], bool], ...] = (
        lambda name: names[name] == last,
        lambda name: abbreviates(last, names[name]),
        lambda name: any(abbreviates(last, end) for end in _ends(name)),
        lambda name: names[name].startswith(f"{last}_"),
        lambda name: bool(difflib.get_close_matches(last, [names[name]], cutoff=0.75)),
    )
    for fits in rules:
        matches = [name for name in names if fits(name)]
        if matches := [name for name in matches if name.rpartition(".")[0] == parent] or matches:
            return sorted(
                matches, key=lambda name: (-difflib.SequenceMatcher(None, key, name).ratio(), name)
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
