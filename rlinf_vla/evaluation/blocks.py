"""A sweep, cut into blocks that are played and kept one by one. Where the cuts are follows from the recipe's numbers alone, never from
who plays a block or when: so any part of a sweep can be lost and played again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_vla.rollout.episodes import EVALUATION_SEEDS
from rlinf_vla.types import UserError

START, EXPERT, RANDOM = "start", "expert", "random"
SCRIPTED = (EXPERT, RANDOM)
"""Who plays without a policy."""


@dataclass(frozen=True)
class Entrant:
    """Who plays. ``name`` in tables; ``policy``: START, one of SCRIPTED, or a directory; ``mode``: sampled or greedy, None where it is
    SCRIPTED."""

    name: str
    policy: str
    mode: str | None


@dataclass(frozen=True)
class Block:
    """Episodes of one task, by one entrant. The first three are places: in the entrants, in the parts, in the part's tasks."""

    entrant: int
    part: int
    task: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.entrant:02d}_{self.part:03d}_{self.task:03d}_{self.seeds[0]:07d}"


@dataclass(frozen=True)
class Job:
    """``filmed``: the block's outcomes are known, and it is played again for its films."""

    block: Block
    filmed: bool = False


def entrants(policies: Sequence[str], modes: Sequence[str]) -> list[Entrant]:
    """Every policy in every mode, under names that tell them apart. Raises UserError where one stands there twice, or none."""
    twice = sorted({each for each in policies if policies.count(each) > 1})
    if twice:
        raise UserError(f"sweep.policies names {twice[0]} twice")
    if not modes and any(each not in SCRIPTED for each in policies):
        raise UserError("evaluation.modes is empty: choose sampled, greedy or both")
    found = []
    for policy, name in zip(policies, _names(policies), strict=True):
        if policy in SCRIPTED:
            found.append(Entrant(name, policy, None))
        else:
            found += [Entrant(name if len(modes) == 1 else f"{name} {mode}", policy, mode) for mode in modes]
    return found


def cut(entrants: int, tasks: Sequence[int], episodes: int, size: int) -> list[Block]:
    """``episodes`` of every task for every entrant, at most ``size`` in a block; all of a part together, because starting its simulators
    takes long. ``tasks``: how many each part has.

    Raises UserError where there are not so many episodes.
    """
    if episodes > len(EVALUATION_SEEDS):
        raise UserError(f"episodes={episodes}: {len(EVALUATION_SEEDS)} seeds are reserved for evaluation")
    seeds = EVALUATION_SEEDS[:episodes]
    return [
        Block(entrant, part, task, tuple(seeds[first : first + size]))
        for part, count in enumerate(tasks)
        for entrant in range(entrants)
        for task in range(count)
        for first in range(0, episodes, size)
    ]


def _names(policies: Sequence[str]) -> list[str]:
    """Of directories as many of the last names as it takes to tell them apart."""
    parts = [(each,) if each in (START, *SCRIPTED) else _telling(Path(each)) for each in policies]
    count = 1
    while True:
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names) or count > max(map(len, parts)):
            return names
        count += 1


def _telling(path: Path) -> tuple[str, ...]:
    return tuple(name for name in path.expanduser().absolute().parts[1:] if name != "checkpoints") or (str(path),)
