"""Recipe nodes ``env`` and ``session`` of what is played at a robot (node ``robot``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.ranges import Count, Name, OneOf, Positive, Range, Seconds

ROBOT = "robot"
NOBODY = "nobody"
BY_SCRIPT = "script"
ACKNOWLEDGED_BY = ("person", BY_SCRIPT)


@dataclass
class RobotEnvConfig:
    """``env=robot``: episodes are played at the recipe's robot, one after the other."""

    name: Name = ROBOT
    num_envs: Annotated[int, Range(1, 1)] = 1
    episode_limit: Count = 60
    """Control periods after which an episode is cut."""


@dataclass
class SessionConfig:
    """Of an online session at a robot (docs/online.md)."""

    person: Name = NOBODY
    """Who may take over, pause and judge, by the device in her hands: keyboard, gamepad or spacemouse; nobody."""
    device: str | None = None
    """Its path; null: the first that is found."""
    acknowledge: Annotated[str, OneOf(*ACKNOWLEDGED_BY)] = "person"
    """Who lets the arm go on after a fault: a person, by the device or with `rlinf-vla robot acknowledge`; script, of a simulated robot."""
    patience_s: Annotated[float, Range(0, 1e8)] | None = None
    """Of a simulated robot: the scene's expert takes over in a training episode without success after so many seconds; null: never."""
    minutes: Positive | None = None
    """After which no further iteration begins, evaluations not counted in; null: as many as ``iterations`` says."""
    connect_s: Seconds = 60.0
    """Until the robot must be there."""
    home_s: Seconds = 60.0
    """Until it must be at its rest position."""
    silence_s: Seconds = 90.0
    """After which a process beside the robot that says nothing counts as hung, and is replaced; above ``connect_s``."""
    learner_nice: Annotated[int, Range(0, 19)] = 10
    """Nice value of the updates: where cores are shared, the control loop goes first."""
