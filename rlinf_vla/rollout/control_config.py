"""What a recipe may set of the loop that drives a robot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.ranges import Count, CountOrZero, Range, Seconds, Size
from rlinf_vla.types import UserError


@dataclass
class ControlConfig:
    """Of the loop that drives a robot (docs/control_loop.md). A control step, or tick, is one period of the robot's control rate."""

    asynchronous: bool | None = None
    """true: the arm goes on with its chunk while the policy infers the next. false: it infers, then executes. null: true where a chunk has
    several actions."""
    execution_horizon: Size | None = None
    """Actions that are executed between two observations that the policy is asked about; null: 1, or synchronous the whole chunk."""
    real_time_chunking: bool = False
    """The policy makes each chunk a continuation of what the arm will have done meanwhile (flow policies, asynchronous only)."""
    max_observation_age_s: Seconds = 1.0
    """No command comes from an older observation."""
    max_misses: Count = 10
    """Control steps in a row without a command, after which the robot is stopped; until then it decelerates and holds."""
    reserve_ms: Annotated[float, Range(0, 1000)] = 5.0
    """Synchronous: so long before its next tick, the loop no longer waits for the policy."""
    warmup: CountOrZero = 3
    """Inferences before the first motion, which count nowhere."""


@dataclass(frozen=True)
class Timing:
    """What the loop goes by, in seconds and steps: a ControlConfig for one robot and one policy."""

    period: float
    asynchronous: bool
    horizon: int
    max_age: float
    reserve: float


def timing(config: ControlConfig, control_hz: float, chunk: int) -> Timing:
    """Raises UserError where the settings, the robot's rate and the policy's ``chunk`` cannot be had together."""
    period = 1 / control_hz
    asynchronous = chunk > 1 if config.asynchronous is None else config.asynchronous
    horizon = config.execution_horizon if config.execution_horizon is not None else 1 if asynchronous else chunk
    if asynchronous and chunk == 1:
        raise UserError("control.asynchronous=true: the policy's chunk has one action, which is past when it comes: set it to false")
    if config.real_time_chunking and not asynchronous:
        raise UserError("control.real_time_chunking=true continues a chunk that is being executed: set control.asynchronous=true")
    most = chunk - 1 if asynchronous else chunk
    if not 1 <= horizon <= most:
        raise UserError(f"control.execution_horizon={horizon}: must be from 1 to {most}, as the policy's chunk has {chunk} actions")
    if config.reserve_ms >= 1e3 * period:
        raise UserError(f"control.reserve_ms={config.reserve_ms:g} is no less than the control period of {1e3 * period:g} ms")
    last = (horizon - (0 if asynchronous else 1)) * period
    if config.max_observation_age_s <= last:
        raise UserError(
            f"control.max_observation_age_s={config.max_observation_age_s:g}: the last of {horizon} actions is executed {last:g} s after "
            "their observation or later: allow more, or set a smaller control.execution_horizon"
        )
    return Timing(period, asynchronous, horizon, config.max_observation_age_s, config.reserve_ms / 1e3)


def inference_budget(timing: Timing, chunk: int) -> float:
    """Seconds that every inference may take without a miss, where sensors and commands take none and no observation gets too old.

    Asynchronous, with chunks of ``C``: one that was begun in the period after its observation, and the one that follows it, are both over
    before the chunk of the former is: ``2 d <= (C - 1) p``. Where they are shorter than the ``h`` periods between two: ``d <= (C - h) p``.
    """
    if not timing.asynchronous:
        return timing.period - timing.reserve
    left = chunk - timing.horizon
    return timing.period * (left if left < timing.horizon else max(timing.horizon, (chunk - 1) / 2))
