"""Work of one iteration under any plan: policy calls, episodes that end, optimiser steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Workload:
    """Work of one iteration. ``chunk``: control steps per policy call."""

    envs: int
    batch_size: int
    """Environments per policy call; a larger group makes several calls."""
    minibatch_size: int
    epochs: int
    episode_calls: int
    """Policy calls in an episode that reaches its time limit."""
    chunk: int
    calls: int | None = None
    """Policy calls per environment and iteration; None: ``listed`` episodes run to their ends."""
    listed: int = 0
    lengths: tuple[tuple[int, bool], ...] = ()
    """(policy calls, cut off by the time limit) of typical episodes; empty: all reach the limit."""
    groups_per_step: int | None = None
    """Groups of ``attempts`` episodes per optimiser step, in order; None: shuffled minibatches."""
    attempts: int = 1
    rewarded: bool = False
    """A reward other than the simulator's is computed from the rollouts."""
    reference: bool = False
    """Log-probabilities of the reference policy are computed."""
    proximal: bool = False
    """Log-probabilities of the policy at the beginning of the update are computed."""
    fixes: bool = False
    """The frozen part of the policy is computed once per update."""
    critic: bool = True
    """Bootstrap values are computed for episodes that are cut off."""
    broadcast: bool = False
    """New weights are broadcast, unless roles take turns, and not fetched from the object store."""
    sharded: bool = False
    """Each trainer rank holds a share of the weights, their gradients and Adam's moments."""
    measured: bool = False
    """Trainer ranks get rows in proportion to their speed; false: as many on each."""
    row_groups: int = 1
    """Fixed groups from which minibatches are drawn evenly."""
    processes: int | None = None
    """Simulator processes of all rollout workers; None: one per core. At least one per group."""

    @property
    def rows(self) -> int:
        """Policy calls that an iteration's updates train on."""
        return self.calls_of(*self.parts(None))

    @property
    def most_rows(self) -> int:
        """Policy calls of the largest optimiser step, if every episode reaches its time limit."""
        groups = self.groups_per_step
        return (
            self.minibatch_size
            if groups is None
            else min(groups * self.attempts, self.listed) * self.episode_calls
        )

    @property
    def minibatches(self) -> Sequence[tuple[int, int]]:
        """(number, policy calls) of optimiser steps in an epoch; groups count as equally long."""
        per_step = self.groups_per_step
        units, size = (
            (self.rows, self.minibatch_size)
            if per_step is None
            else (self.listed // self.attempts, per_step)
        )
        full, rest = divmod(units, size)
        return tuple(
            (count, -(-size_of_step * self.rows // units))
            for count, size_of_step in ((full, size), (1, rest))
            if count and size_of_step
        )

    def parts(self, workers: int | None) -> list[range]:
        """Split environments evenly, or episodes by whole groups, about one per environment.

        ``workers`` None: one process, which takes all at once.
        """
        total = self.listed if self.calls is None else self.envs
        if workers is None:
            return [range(total)]
        size = self.attempts * max(1, -(-(self.envs // workers) // self.attempts))
        return [range(first, min(first + size, total)) for first in range(0, total, size)]

    def calls_of(self, part: range) -> int:
        return (
            sum(self.length(0, index)[0] for index in part)
            if self.calls is None
            else len(part) * self.calls
        )

    @property
    def steps(self) -> int:
        """Upper bound on the control steps of an iteration."""
        return self.rows * self.chunk

    def length(self, environment: int, ordinal: int) -> tuple[int, bool]:
        """(policy calls, cut off) of an environment's ``ordinal``-th episode; lengths cycle."""
        return (
            self.lengths[(environment + ordinal) % len(self.lengths)]
            if self.lengths
            else (self.episode_calls, True)
        )


@dataclass(frozen=True)
class Round:
    """Policy calls of an environment group, and what follows the last of them.

    ``valued``: bootstrap values are computed. ``resets``: environments that begin another episode.
    """

    valued: bool
    resets: tuple[int, ...]
    calls: int = 1


MOST_ROUNDS = 400
"""Rounds of a group that are simulated one by one: of a longer rollout several calls are one round,
because its simulation would take minutes."""


@lru_cache(maxsize=4096)
def rounds(workload: Workload, part: range, size: int, depth: int) -> list[list[Round]]:
    """Rounds of ``depth`` groups of ``size`` environments that a worker runs for a ``part``."""
    if workload.calls is None:
        groups = _listed(workload, part, size, depth)
    else:
        groups = [
            _slots(workload, part[group * size : (group + 1) * size]) for group in range(depth)
        ]
    calls = workload.calls or -(-workload.listed // workload.envs) * workload.episode_calls
    return [_joined(group_rounds, -(-calls // MOST_ROUNDS)) for group_rounds in groups]


def _joined(rounds: Sequence[Round], most: int) -> list[Round]:
    """Join up to ``most`` rounds of which nothing follows the first ones."""
    joined: list[Round] = []
    for item in rounds:
        before = joined[-1] if joined else None
        if before is not None and before.calls < most and not (before.valued or before.resets):
            item = replace(item, calls=before.calls + 1)
            joined.pop()
        joined.append(item)
    return joined


def _slots(workload: Workload, environments: Sequence[int]) -> list[Round]:
    """Rounds of one group whose environments make ``workload.calls`` calls in sequence."""
    assert workload.calls is not None
    ordinal = [0] * len(environments)
    left = [workload.length(environment, 0) for environment in environments]
    slots = []
    for call in range(1, workload.calls + 1):
        left = [(calls - 1, cut) for calls, cut in left]
        ended = [index for index, (calls, _) in enumerate(left) if not calls]
        last = call == workload.calls
        cut = any(left[index][1] for index in ended) or (last and len(ended) < len(left))
        for index in ended:
            ordinal[index] += 1
            left[index] = workload.length(environments[index], ordinal[index])
        slots.append(Round(workload.critic and cut, () if last else tuple(ended)))
    return slots


def _listed(workload: Workload, share: range, size: int, depth: int) -> list[list[Round]]:
    """Rounds of a worker that runs each episode of ``share`` once, on the next free environment.

    An environment without an episode rests until its group ends; if there was none for it from the
    start, it first repeats the last one, which is ignored (see ``rollout/player.py``).
    """
    waiting = [workload.length(0, episode)[0] for episode in reversed(share)]
    spare = workload.length(0, share[-1])[0]
    left = [
        [(waiting.pop(), True) if waiting else (spare, False) for _ in range(size)]
        for _ in range(depth)
    ]
    groups: list[list[Round]] = [[] for _ in range(depth)]
    active = list(range(depth))
    resetting = [
        False
    ] * depth  # a reset takes a separate turn, in which other groups take from the list
    while active:
        for index in list(active):
            if resetting[index]:
                resetting[index] = False
                continue
            left[index] = group = [
                (calls - 1, unfinished and calls > 1) for calls, unfinished in left[index]
            ]
            begun = [slot for slot, (calls, _) in enumerate(group) if not calls][: len(waiting)]
            for slot in begun:
                group[slot] = (waiting.pop(), True)
            groups[index].append(Round(False, tuple(begun)))
            resetting[index] = bool(begun)
            if not any(unfinished for _, unfinished in group):
                active.remove(index)
    return groups
