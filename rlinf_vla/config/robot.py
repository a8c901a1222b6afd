"""Define the recipe nodes ``env`` and ``session`` for episodes at a robot (node ``robot``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.config.ranges import Count, Name, OneOf, Positive, Range, Seconds

ROBOT = "robot"
NO_OPERATOR = "none"
BY_SCRIPT = "script"
ACKNOWLEDGED_BY = ("operator", BY_SCRIPT)


@dataclass
class RobotEnvConfig:
    """``env=robot``: run episodes at the recipe's robot, one at a time."""

    name: Name = ROBOT
    num_envs: Annotated[int, Range(1, 1)] = 1
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
    `rlinf-vla robot acknowledge`), or script (automatic, for simulated robots only)."""
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
