"""Recipe nodes ``env`` and ``session`` of what is played at a robot (node ``robot``)."""

from __future__ import annotations

from dataclasses import dataclass

ROBOT = "robot"
NOBODY = "nobody"
BY_SCRIPT = "script"
ACKNOWLEDGED_BY = ("person", BY_SCRIPT)


@dataclass
class RobotEnvConfig:
    """``env=robot``: episodes are played at the recipe's robot, one after the other."""

    name: str = ROBOT
    num_envs: int = 1
    episode_limit: int = 60
    """Control periods after which an episode is cut."""


@dataclass
class SessionConfig:
    """Of an online session at a robot (docs/online.md)."""

    person: str = NOBODY
    """Who may take over, pause and judge, by the device in her hands: keyboard, gamepad or spacemouse; nobody."""
    device: str | None = None
    """Its path; null: the first that is found."""
    acknowledge: str = "person"
    """Who lets the arm go on after a fault: a person, by the device or with `rlinf-vla robot acknowledge`; script, of a simulated robot."""
    patience_s: float | None = None
    """Of a simulated robot: the scene's expert takes over in a training episode without success after so many seconds; null: never."""
    minutes: float | None = None
    """After which no further iteration begins, evaluations not counted in; null: as many as ``iterations`` says."""
    connect_s: float = 60.0
    """Until the robot must be there."""
    home_s: float = 60.0
    """Until it must be at its rest position."""
    silence_s: float = 90.0
    """After which a process beside the robot that says nothing counts as hung, and is replaced; above ``connect_s``."""
    learner_nice: int = 10
    """Nice value of the updates: where cores are shared, the control loop goes first."""
