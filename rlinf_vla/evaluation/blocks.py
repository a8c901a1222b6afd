"""Split a sweep into blocks of episodes that are played and saved one by one.

The split depends on the recipe alone, not on which worker plays a block or when. Any lost block can
therefore be played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_vla.config.errors import UserError
from rlinf_vla.rollout.episodes import EVALUATION_SEEDS

START, EXPERT, RANDOM = "start", "expert", "random"
SCRIPTED = (EXPERT, RANDOM)
"""Sources of actions that need no policy."""


@dataclass(frozen=True)
class EvalPolicy:
    """A policy under evaluation, with its name in tables.

    ``source``: START, one of SCRIPTED, or a directory. ``mode``: sampled or greedy; None if
    SCRIPTED.
    """

    name: str
    source: str
    mode: str | None


@dataclass(frozen=True)
class Block:
    """Episodes of one task and policy. ``task`` is the index within the suite."""

    policy: int
    suite: int
    task: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the block's file."""
        return f"{self.policy:02d}_{self.suite:03d}_{self.task:03d}_{self.seeds[0]:07d}"


@dataclass(frozen=True)
class Job:
    """Work on one block. ``filmed``: its outcomes are known; it is played again for its videos."""

    block: Block
    filmed: bool = False


def eval_policies(policies: Sequence[str], modes: Sequence[str]) -> list[EvalPolicy]:
    """Return every policy in every mode under distinct names.

    Raises UserError if a policy is listed twice, or if a policy needs a mode and there is none.
    """
    twice = sorted({each for each in policies if policies.count(each) > 1})
    if twice:
        raise UserError(f"sweep.policies names {twice[0]} twice")
    if not modes and any(each not in SCRIPTED for each in policies):
        raise UserError("evaluation.modes is empty: choose sampled, greedy or both")
    found = []
    for policy, name in zip(policies, _names(policies), strict=True):
        if policy in SCRIPTED:
            found.append(EvalPolicy(name, policy, None))
        else:
            found += [EvalPolicy(name if len(modes) == 1 else f"{name} {mode}", policy, mode) for mode in modes]
    return found


def split_into_blocks(policies: int, tasks: Sequence[int], episodes: int, size: int) -> list[Block]:
    """Return blocks of at most ``size`` episodes, ``episodes`` per task and policy.

    ``tasks``: number of tasks of each suite. Blocks of a suite are contiguous, because its
    simulators start slowly. Raises UserError if ``episodes`` exceeds the evaluation seeds.
    """
    if episodes > len(EVALUATION_SEEDS):
        raise UserError(f"episodes={episodes}: {len(EVALUATION_SEEDS)} seeds are reserved for evaluation")
    seeds = EVALUATION_SEEDS[:episodes]
    return [
        Block(policy, suite, task, tuple(seeds[first : first + size]))
        for suite, count in enumerate(tasks)
        for policy in range(policies)
        for task in range(count)
        for first in range(0, episodes, size)
    ]


def _names(policies: Sequence[str]) -> list[str]:
    """Return distinct names: of each directory, the fewest last path components that suffice."""
    parts = [(each,) if each in (START, *SCRIPTED) else _telling(Path(each)) for each in policies]
    count = 1
    while True:
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names) or count > max(map(len, parts)):
            return names
        count += 1


def _telling(path: Path) -> tuple[str, ...]:
    return tuple(name for name in path.expanduser().absolute().parts[1:] if name != "checkpoints") or (str(path),)
