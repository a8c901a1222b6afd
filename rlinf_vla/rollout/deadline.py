"""Run simulators by the clock of a robot's control loop: each action chunk arrives late.

::

    step        0  1  2  3  4  5  6  7  8        horizon 4, a delay of 2 steps, chunks of 6 actions
    observe     o0    o1          o2             o0: the arm stands and waits, which costs no step
    execute     a0[0] a0[1] a0[2] a0[3]          o1 is taken while two actions of a0 are left;
                            a1[2] a1[3] a1[4]    they are executed while the policy infers a1,
                                                 whose first two actions are past when it arrives
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import DeadlineConfig
from rlinf_vla.core.io import parse_json
from rlinf_vla.core.protocols import VectorEnv, WrappedEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult
from rlinf_vla.rollout.actor import rows_chosen
from rlinf_vla.rollout.noise import DELAY, CounterNoise

OPEN = 1.0
"""Gripper action of an arm that is held before its first action."""


@dataclass(frozen=True)
class Deadline:
    """The delays of a control loop, in control steps."""

    ticks: tuple[int, ...]
    """Delays between an observation and its chunk; each inference draws one of them."""
    horizon: int
    """Actions executed per inference."""
    drop: float = 0.0
    """Probability that a chunk never arrives; the arm is held for the horizon then."""


def deadline_of(config: DeadlineConfig, chunk: int, control_hz: float) -> Deadline | None:
    """Return the deadline that a recipe asks for with chunks of ``chunk`` actions, None without
    one. Raises UserError."""
    if config.measured is None and not config.delays:
        return None
    ticks = (
        tuple(config.delays) if config.measured is None else _measured(config.measured, control_hz)
    )
    longest = max(ticks)
    horizon = config.execution_horizon or chunk - longest
    if not longest <= horizon <= chunk - longest:
        raise UserError(
            f"rollout.deadline: with delays of up to {longest} steps and execution_horizon={horizon}, chunks of {chunk} actions run out: "
            f"it must be from {longest} to chunk - {longest} = {chunk - longest}, so use longer chunks or shorter delays"
        )
    return Deadline(ticks, horizon, config.drop)


def _measured(location: str, control_hz: float) -> tuple[int, ...]:
    """Return 100 delays distributed as in a ``control.json``, in steps at ``control_hz``."""
    try:
        document: dict[str, Any] = parse_json(Path(location).expanduser().read_text())
        counts = {int(ticks): int(count) for ticks, count in document["delay_ticks"].items()}
        scale = control_hz / float(document["control_hz"])
        total = sum(counts.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UserError(
            f"rollout.deadline.measured={location} is no control.json of a robot run ({error})"
        ) from None
    if total < 1 or min(counts) < 0:
        raise UserError(
            f"rollout.deadline.measured={location} counts no inference: take the file of a longer run"
        )
    ordered = [ticks for ticks, count in sorted(counts.items()) for _ in range(count)]
    return tuple(math.ceil(scale * ordered[percent * total // 100]) for percent in range(100))


class DeadlineEnv(WrappedEnv):
    """Wrap ``env`` so that chunks arrive late.

    A step executes ``horizon`` actions of each chunk, from its environment's delay on, and returns
    the observation that the arm had one delay before their end: the next inference starts from it.
    Reward and flags of an executed action are at its place in the chunk. Delays depend on the run
    seed, the episode and its step alone.
    """

    def __init__(self, env: VectorEnv, deadline: Deadline, run_seed: int) -> None:
        """Raises UserError if an arm cannot be held in ``env``: its actions are not motions."""
        if env.spec.motion is None:
            raise UserError(
                "rollout.deadline: actions of this environment do not move a tool, so that none holds it: leave it out"
            )
        super().__init__(env)
        self.spec = replace(env.spec, steps_per_call=deadline.horizon)
        self._deadline = deadline
        self._seed = run_seed
        self._delays = torch.tensor(deadline.ticks)
        self._delay = self._step = torch.zeros(env.spec.num_envs, dtype=torch.int64)
        self._gripper = torch.full((env.spec.num_envs,), OPEN)

    _episodes: Episodes
    _masked: Tensor | None
    _late: Observation
    """What the policy has seen."""
    _now: Observation
    """What the arm sees."""

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        fresh = torch.ones(len(episodes), dtype=torch.bool) if mask is None else mask.cpu()
        self._masked = None if mask is None else fresh
        self._episodes = (
            episodes if mask is None else Episodes.where(fresh, episodes, self._episodes)
        )
        self._delay, self._step = (
            torch.where(fresh, 0, tensor) for tensor in (self._delay, self._step)
        )
        self._gripper = torch.where(fresh, OPEN, self._gripper)
        self._env.reset_async(episodes, mask)

    def reset_wait(self) -> Observation:
        self._now = self._env.reset_wait()
        self._late = (
            self._now if self._masked is None else rows_chosen(self._masked, self._now, self._late)
        )
        return self._late

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        cpu_actions = actions.cpu()
        horizon = self._deadline.horizon
        delay, dropped = self._drawn()
        indices = self._delay[:, None] + torch.arange(horizon)
        asked = cpu_actions[torch.arange(len(cpu_actions))[:, None], indices]
        held = torch.zeros_like(asked)
        held[..., -1] = self._gripper[:, None]
        self._actions = torch.where(dropped[:, None, None], held, asked)
        self._gripper = self._actions[:, -1, -1]
        self._place = indices
        self._shape = cpu_actions.shape[:2]
        self._next = delay
        self._cuts = sorted({*(horizon - delay).tolist(), horizon} - {0})
        self._skip = skip_ended
        self._env.step_async(self._part(0), skip_ended)

    def step_wait(self) -> StepResult:
        horizon = self._deadline.horizon
        look = horizon - self._next
        seen = self._now
        ended = torch.zeros(len(look), dtype=torch.bool)
        parts = list[dict[str, Tensor]]()
        for number, cut in enumerate(self._cuts):
            if number:
                if ended.all():
                    break
                self._env.step_async(self._part(number), True)
            result = self._env.step_wait()
            # a reward can end an episode that its simulator plays on, so later parts do not count
            parts.append(
                {name: value.cpu() * ~ended[:, None] for name, value in result.outcome.items()}
            )
            ended = ended | result.done.cpu()
            seen = rows_chosen((look == cut) | ended, result.observation, seen)
        self._now = result.observation
        self._late = seen
        chunk_result = self._spread(parts)
        self._step = self._step + chunk_result.valid.sum(1).cpu()
        self._delay = self._next
        return chunk_result

    def _part(self, number: int) -> Tensor:
        """Return the actions between two cuts, on the environment's device."""
        first = self._cuts[number - 1] if number else 0
        return self._actions[:, first : self._cuts[number]].contiguous().to(self.spec.device)

    def _spread(self, parts: Sequence[dict[str, Tensor]]) -> StepResult:
        """Return one result with the outcome of each action at its place in the chunk."""
        rows = torch.arange(len(self._place))[:, None]
        fields = dict[str, Tensor]()
        for name in parts[0]:
            value = torch.cat([part[name] for part in parts], 1)
            fields[name] = torch.zeros(self._shape, dtype=value.dtype)
            fields[name][rows, self._place[:, : value.shape[1]]] = value
        return StepResult(self._late, **fields).outcome_to(self.spec.device)

    def _drawn(self) -> tuple[Tensor, Tensor]:
        """Draw the delays of the inferences that come next, and whether the chunks of these calls
        are dropped: int64 and bool ``[B]``."""
        episodes = self._episodes
        noise = CounterNoise(
            self._seed, episodes.task_id.cpu(), episodes.seed.cpu(), self._step, DELAY
        )
        drawn = noise.uniform(2)
        index = (drawn[:, 0].double() * len(self._delays)).long().clamp(max=len(self._delays) - 1)
        return self._delays[index], drawn[:, 1] < self._deadline.drop
