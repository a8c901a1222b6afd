"""What an iteration has to do, whatever the plan: policy calls, episodes that end on the way, optimiser steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Workload:
    envs: int
    batch_size: int
    """Environments per policy call; a group with more makes several."""
    minibatch_size: int
    epochs: int
    episode_calls: int
    """Policy calls in an episode that lasts for its limit."""
    chunk: int
    calls: int | None = None
    """Policy calls per environment and iteration; None: ``listed`` says how many episodes are played, each to its end."""
    listed: int = 0
    lengths: tuple[tuple[int, bool], ...] = ()
    """Policy calls of typical episodes, and whether each was cut off by its limit; empty: all last for it."""
    groups_per_step: int | None = None
    """Where optimiser steps are of whole groups, in their order: groups of ``attempts`` episodes."""
    attempts: int = 1
    rewarded: bool = False
    """Another reward than the simulator's own is computed from what was played."""
    reference: bool = False
    """Log-probabilities of the frozen policy are wanted."""
    proximal: bool = False
    """And those of the policy as an update begins."""
    fixes: bool = False
    """What is frozen in the policy is computed once per update."""
    critic: bool = True
    """Episodes that are cut are valued."""
    processes: int | None = None
    """Simulator processes of a rollout worker, over all its groups; None: one per core, and at least one per group."""

    @property
    def rows(self) -> int:
        """Policy calls that an update learns from."""
        return self.envs * self.calls if self.calls is not None else self.calls_of(range(self.listed))

    def parts(self, workers: int | None) -> list[range]:
        """In what pieces the listed episodes are given to ``workers``: whole groups, about as many as a worker has environments.

        None: there is one process, and it plays them all in one go.
        """
        if workers is None:
            return [range(self.listed)]
        each = self.attempts * max(1, -(-(self.envs // workers) // self.attempts))
        return [range(first, min(first + each, self.listed)) for first in range(0, self.listed, each)]

    def calls_of(self, episodes: range) -> int:
        return sum(self.length(0, index)[0] for index in episodes)

    @property
    def steps(self) -> int:
        """Control steps at most."""
        return self.rows * self.chunk

    def length(self, environment: int, ordinal: int) -> tuple[int, bool]:
        """Of the ``ordinal``-th episode of an environment: every measured length is drawn equally often."""
        return self.lengths[(environment + ordinal) % len(self.lengths)] if self.lengths else (self.episode_calls, True)


@dataclass(frozen=True)
class Round:
    """One policy call of an environment group, and what follows. ``resets``: environments of the group that begin another episode."""

    valued: bool
    resets: tuple[int, ...]


@lru_cache(maxsize=4096)
def slot_rounds(workload: Workload, first: int, size: int, depth: int) -> list[list[Round]]:
    """Of ``depth`` groups of ``size`` environments, from number ``first`` on, that play ``workload.calls`` policy calls each."""
    return [_slots(workload, range(first + group * size, first + (group + 1) * size)) for group in range(depth)]


def _slots(workload: Workload, environments: Sequence[int]) -> list[Round]:
    """Every environment plays ``workload.calls`` calls, episode after episode."""
    assert workload.calls is not None
    ordinal = [0] * len(environments)
    left = [workload.length(environment, 0) for environment in environments]
    found = []
    for call in range(1, workload.calls + 1):
        left = [(calls - 1, cut) for calls, cut in left]
        ended = [index for index, (calls, _) in enumerate(left) if not calls]
        last = call == workload.calls
        cut = any(left[index][1] for index in ended) or (last and len(ended) < len(left))
        for index in ended:
            ordinal[index] += 1
            left[index] = workload.length(environments[index], ordinal[index])
        found.append(Round(workload.critic and cut, () if last else tuple(ended)))
    return found


@lru_cache(maxsize=4096)
def listed_rounds(workload: Workload, share: range, size: int, depth: int) -> list[list[Round]]:
    """Each episode of ``share`` once, on whatever environment is free; one that is left without plays the last again, in vain, until
    its group has ended (``rollout/listed.py``)."""
    waiting = [workload.length(0, episode)[0] for episode in reversed(share)]
    spare = workload.length(0, share[-1])[0]

    def taken() -> tuple[int, bool]:
        return (waiting.pop(), True) if waiting else (spare, False)

    left = [[taken() for _ in range(size)] for _ in range(depth)]
    found: list[list[Round]] = [[] for _ in range(depth)]
    active = list(range(depth))
    resetting = [False] * depth  # a reset takes a turn of its own, in which others take from the list
    while active:
        for index in list(active):
            if resetting[index]:
                resetting[index] = False
                continue
            group = [(calls - 1, wanted) for calls, wanted in left[index]]
            ended = [slot for slot, (calls, _) in enumerate(group) if not calls]
            group = [taken() if slot in ended else each for slot, each in enumerate(group)]
            left[index] = group
            last = not waiting and not any(wanted for _, wanted in group)
            found[index].append(Round(False, () if last else tuple(ended)))
            resetting[index] = bool(found[index][-1].resets)
            if last:
                active.remove(index)
    return found
