"""Recipe nodes of episodes at a robot: ``env``, ``session`` and ``control``, with its timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Count, CountOrZero, Name, OneOf, Positive, Range, Seconds, Size

ROBOT = "robot"
NO_OPERATOR = "none"
BY_SCRIPT = "script"
ACKNOWLEDGED_BY = ("operator", BY_SCRIPT)


@dataclass
class RobotEnvConfig:
    """``env=robot``: run episodes at the recipe's robot, one at a time."""

    name: Name = ROBOT
    num_envs: Annotated[int, Range(1, 1)] = 1
    """One robot."""
    episode_limit: Count = 60
    """Control steps after which an episode is truncated."""


@dataclass
class SessionConfig:
    """Online training session at a robot (docs/online.md)."""

    operator: Name = NO_OPERATOR
    """Device with which the operator takes over, pauses and reports success or failure: keyboard,
    gamepad or spacemouse; none: no operator."""
    device: str | None = None
    """Path of the operator's device; null: the first one found."""
    acknowledge: Annotated[str, OneOf(*ACKNOWLEDGED_BY)] = "operator"
    """Who acknowledges a fault so that the arm may move again: operator (by the device or with
    `rlinf-vla robot acknowledge`), or script (automatic, for simulated robots only, and never for
    what a person has stopped)."""
    patience_s: Annotated[float, Range(0, 1e8)] | None = None
    """Simulated robots: the scene's expert takes over a training episode that has lasted this long
    without success; null: never."""
    minutes: Positive | None = None
    """Begin no iteration more than this many minutes after the first; null: no time limit."""
    connect_s: Seconds = 60.0
    """Time limit to connect to the robot."""
    home_s: Seconds = 60.0
    """Time limit for the robot to reach its rest position."""
    silence_s: Seconds = 90.0
    """Replace the robot process if it sends nothing for this long; must exceed ``connect_s``."""
    learner_nice: Annotated[int, Range(0, 19)] = 10
    """Nice value of the updates, so that the control loop has priority on shared cores."""


@dataclass
class ControlConfig:
    """Recipe node ``control``: the loop that drives a robot (docs/control_loop.md).
    A control step, or tick, is one period of the robot's control rate."""

    asynchronous: bool | None = None
    """Whether the arm executes the current chunk while the policy infers the next one (true), or
    waits for each inference (false). null: true for chunks of several actions."""
    execution_horizon: Size | None = None
    """Actions executed per inference request; null: 1 if asynchronous, else the whole chunk."""
    real_time_chunking: bool = False
    """Make each chunk continue the actions executed during inference (asynchronous flow policy)."""
    requests_in_flight: Annotated[int, Range(1, 64)] = 1
    """Most inferences under way at the same time, each of another observation. More than one hides
    the delay of a network between a head and its backbone (``rollout.backbone``)."""
    max_observation_age_s: Seconds = 1.0
    """Never execute an action whose observation is older than this."""
    max_misses: Count = 10
    """Stop the robot after this many control steps in a row without a command; until then it
    decelerates and holds."""
    reserve_ms: Annotated[float, Range(0, 1000)] = 5.0
    """Synchronous: stop waiting for the policy this many milliseconds before the next tick."""
    warmup: CountOrZero = 3
    """Inferences before the first motion; their times are reported separately."""


@dataclass(frozen=True)
class Timing:
    """A ControlConfig resolved for one robot and one policy; times in seconds."""

    period: float
    asynchronous: bool
    horizon: int
    max_age: float
    reserve: float


def timing(config: ControlConfig, control_hz: float, chunk: int) -> Timing:
    """Raises UserError if settings, control rate and the policy's ``chunk`` are incompatible."""
    period = 1 / control_hz
    asynchronous = chunk > 1 if config.asynchronous is None else config.asynchronous
    horizon = (
        config.execution_horizon
        if config.execution_horizon is not None
        else 1
        if asynchronous
        else chunk
    )
    if asynchronous and chunk == 1:
        raise UserError(
            "control.asynchronous=true: the policy's chunk of one action arrives too late to execute: set it to false"
        )
    if config.real_time_chunking and not asynchronous:
        raise UserError(
            "control.real_time_chunking=true continues a chunk that is being executed: set control.asynchronous=true"
        )
    if config.requests_in_flight > 1 and (not asynchronous or config.real_time_chunking):
        raise UserError(
            f"control.requests_in_flight={config.requests_in_flight} is for asynchronous chunks that do not continue each other: "
            "set control.asynchronous=true control.real_time_chunking=false"
        )
    most = chunk - 1 if asynchronous else chunk
    if not 1 <= horizon <= most:
        raise UserError(
            f"control.execution_horizon={horizon}: must be from 1 to {most}, as the policy's chunk has {chunk} actions"
        )
    if config.reserve_ms >= 1e3 * period:
        raise UserError(
            f"control.reserve_ms={config.reserve_ms:g} must be less than the control period of {1e3 * period:g} ms"
        )
    last = (horizon - (0 if asynchronous else 1)) * period
    if config.max_observation_age_s <= last:
        raise UserError(
            f"control.max_observation_age_s={config.max_observation_age_s:g}: the last of {horizon} actions is executed {last:g} s after "
            "their observation or later: allow more, or set a smaller control.execution_horizon"
        )
    return Timing(
        period, asynchronous, horizon, config.max_observation_age_s, config.reserve_ms / 1e3
    )


def inference_budget(timing: Timing, chunk: int) -> float:
    """Return the longest inference time in seconds that never causes a missed step.

    Assumes that sensors and commands take no time and that no observation gets too old.

    Asynchronous, with chunks of ``C`` actions, period ``p`` and horizon ``h``: an inference that
    begins within the period of its observation, and the one after it, must both end before the
    former's chunk is used up: ``2 d <= (C - 1) p``. If inferences are shorter than the ``h``
    periods between two requests: ``d <= (C - h) p``.
    """
    if not timing.asynchronous:
        return timing.period - timing.reserve
    left = chunk - timing.horizon
    return timing.period * (left if left < timing.horizon else max(timing.horizon, (chunk - 1) / 2))
