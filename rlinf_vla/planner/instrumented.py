"""Wrap environments and a policy to measure their cost during rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation, StepResult
from rlinf_vla.planner.profile import Cost
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.telemetry.measurement import synchronise, usage

Seen = TypeVar("Seen", StepResult, Observation)


@dataclass(frozen=True)
class TimedCommand:
    """One step or reset of ``environments`` environments.

    ``simulators``, ``own``: core-seconds of the simulator processes and of this process.
    ``wall``: elapsed seconds.
    """

    name: str
    environments: int
    simulators: float
    own: float
    wall: float


@dataclass
class InstrumentedEnv(VectorEnv):
    """Wrap an environment group and record each step and reset with its cost."""

    env: VectorEnv
    commands: list[TimedCommand] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = self.env.spec

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._begin("reset", len(episodes) if mask is None else int(mask.sum()), partial(self.env.reset_async, episodes, mask))

    def reset_wait(self) -> Observation:
        return self._end(self.env.reset_wait)

    def step_async(self, actions: Tensor) -> None:
        self._begin("simulate", len(actions), partial(self.env.step_async, actions))

    def step_wait(self) -> StepResult:
        return self._end(self.env.step_wait)

    def render(self, index: int) -> Tensor:
        return self.env.render(index)

    def expert_actions(self) -> Tensor:
        return self.env.expert_actions()

    def close(self) -> None:
        self.env.close()

    def _begin(self, name: str, environments: int, call: Callable[[], None]) -> None:
        synchronise(self.spec.device)
        self._under_way = name, environments, usage().cpu, time.process_time(), time.perf_counter()
        call()

    def _end(self, call: Callable[[], Seen]) -> Seen:
        result = call()
        synchronise(self.spec.device)
        name, environments, simulators, own, wall = self._under_way
        wall, own = time.perf_counter() - wall, time.process_time() - own
        self.commands.append(TimedCommand(name, environments, usage().cpu - simulators, own, wall))
        return result


class InstrumentedActor(Actor):
    """Sum the core-seconds of policy calls in this process, and their expected core-seconds.

    ``own``: measured. ``foreseen``: expected by the ``Cost`` of each operation.
    """

    def __init__(self, actor: Actor, expected: Mapping[str, Cost]) -> None:
        super().__init__(actor.policy, actor.settings)
        self._expected = expected
        self.own = self.foreseen = 0.0

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        started = time.process_time()
        found = super().act(inputs, episodes, step)
        self._note("act", len(step), started)
        return found

    def value(self, inputs: Inputs) -> Tensor:
        started = time.process_time()
        found = super().value(inputs)
        self._note("value", len(found), started)
        return found

    def _note(self, name: str, rows: int, started: float) -> None:
        self.own += time.process_time() - started
        self.foreseen += self._expected[name].of(rows)
