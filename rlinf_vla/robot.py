"""What a robot implements. numpy only: the process beside the arm needs nothing more of the engine.

SI units everywhere, axes and signs of docs/conventions.md; times are ``time.monotonic()`` of the robot's machine, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Action = NDArray[np.float32]
"""``[D]`` in [-1, 1], D 4 or 7: docs/conventions.md."""


@dataclass(frozen=True)
class ToolPose:
    position: Vector
    """Tool centre point in the base's frame, metres ``[3]``."""
    quaternion: Vector
    """w, x, y, z, unit length ``[4]``."""


@dataclass(frozen=True)
class ToolTarget:
    """Where the tool shall be at the end of the control period, and how far the fingers shall be apart."""

    pose: ToolPose
    gripper_width: float | None = None
    """Metres between the fingers; None leaves them as they are."""


@dataclass(frozen=True)
class RobotState:
    time: float
    """When it was measured."""
    pose: ToolPose
    joints: Vector
    """Radians ``[7]``."""
    joint_velocities: Vector
    """Radians per second ``[7]``."""
    wrench: Vector
    """What the tool feels, in the base's frame: newtons ``[3]``, newton metres ``[3]``."""
    gripper_width: float
    """Metres between the fingers."""
    commanded: ToolTarget | None = None
    """What was last sent to the arm, after every limit. None: nothing yet."""
    fault: str | None = None
    """What stopped the arm, latched until a person acknowledges it; the arm stands still meanwhile."""


@dataclass(frozen=True)
class Intervention:
    """A limit that changed a command."""

    time: float
    rule: str
    """The key of the cell file."""
    before: float
    """What was asked for, in the rule's unit."""
    after: float


@dataclass(frozen=True)
class RobotSpec:
    name: str
    control_hz: float
    """Rate of the policy's actions."""
    translation_m: float
    """How far an action moves whose dx, dy, dz are 1 long together (docs/conventions.md)."""
    rotation_rad: float
    gripper_width_m: float
    """Widest."""
    lag_s: float
    """From a target to the tool being there, at most, where nothing holds it up."""


class Robot(Protocol):
    """One arm. No method but ``connect``, ``home`` and ``close`` ever waits longer than a fraction of a control period.

    The arm is moved by a process of its own, which smooths targets to the servo's rate within the cell's limits, stops the arm when targets
    cease to come, and latches faults. Raises RobotError for what went wrong beside the arm, CellError for a mistake in the cell file.
    """

    spec: RobotSpec

    def connect(self, timeout_s: float) -> None: ...

    def observe(self) -> RobotState:
        """The newest measured state; its ``time`` says how old it is."""

    def command(self, target: ToolTarget, valid_until: float) -> None:
        """Pursue ``target``; without another by ``valid_until`` decelerate and hold. Refused, with RobotError, while a fault is latched."""

    def interventions(self) -> list[Intervention]:
        """Since the last call."""

    def stop(self, why: str) -> None:
        """Decelerate and stand still. Always possible, idempotent; latches ``why``, unless a fault is latched already."""

    def acknowledge(self, person: str) -> None:
        """A person looked, and lets the arm move again: clears what is latched. Never called by code that decides by itself."""

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        """Slowly to the cell's rest position. ``objection``: asked on the way; what it says stops the arm, and is latched."""

    def close(self) -> None:
        """Idempotent; the arm stands still afterwards."""


@runtime_checkable
class Timed(Protocol):
    """A robot that says how long its own sections take, such as ``safety``."""

    def timings(self) -> dict[str, list[float]]:
        """Seconds of each call of each section since the last call of this method."""


class RobotError(RuntimeError):
    """What went wrong with the arm or beside it; one line that names it."""


@dataclass(frozen=True)
class Frame:
    """One picture of a camera."""

    time: float
    """When it was taken."""
    number: int
    image: NDArray[np.uint8]
    """RGB, upright ``[H, W, 3]``."""


class CellError(ValueError):
    """A mistake in a cell file: one line, what is wrong, where, and the mend."""


class Camera(Protocol):
    name: str

    def start(self) -> None: ...

    def latest(self) -> Frame:
        """The newest frame, at once. Raises CameraError where it is older than the camera's limit, or frozen."""

    def close(self) -> None: ...


class CameraError(RobotError):
    pass


class Scene(Protocol):
    """What an episode at a robot begins with, and what it is about."""

    task: str
    """Its name in results."""
    by_hand: bool
    """A person lays it out, and says ``resume`` when it is done."""
    has_expert: bool

    def arrange(self, seed: int) -> str:
        """Lay out the episode of this seed, the arm being at home; its instruction. Raises RobotError."""

    def succeeded(self, state: RobotState) -> bool | None:
        """Now. None: a person or a classifier must say it. Asked at every control step, so it never waits."""

    def expert(self, state: RobotState) -> Action | None:
        """What a scripted human would do now, without memory; None: there is none."""


SUCCESS, FAILURE, PAUSE, RESUME, QUIT, ACKNOWLEDGE = WORDS = ("success", "failure", "pause", "resume", "quit", "acknowledge")
"""What a person may say. Success, failure: the episode is over. Acknowledge: she looked at the arm that stopped, and it may move again."""


class Person(Protocol):
    """Somebody beside the robot with a device in her hands. Nothing here ever waits."""

    @property
    def name(self) -> str: ...

    def action(self, hand: float) -> Action | None:
        """What she does now in the policy's place; None where she leaves it to the policy. ``hand``: the last number of the action before,
        whoever chose it; it stays where she does not work the hand."""

    def words(self) -> list[str]:
        """Of WORDS, what she said since the last call."""

    def close(self) -> None: ...


class PersonPlugin(Protocol):
    """Entry point group ``rlinf_vla.people``: somebody with one kind of device."""

    def __call__(self, device: str | None, dimensions: int) -> Person:
        """``device``: its path, None where it is to be found. ``dimensions``: of actions. Raises RobotError where there is none."""


@dataclass(frozen=True)
class Finding:
    """One line of ``rlinf-vla robot check`` or ``rlinf-vla doctor``. ``mend``: what to do when it is not ``ok``."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


class RobotPlugin(Protocol):
    """Entry point group ``rlinf_vla.robots``. Cheap to import: drivers are imported when first used."""

    Config: type
    """Dataclass: the typed ``robot`` node of a recipe; has at least ``name``."""
    simulated: bool
    """Nobody can be hurt: a script may acknowledge what stopped it."""

    def make(self, config: Any) -> Robot: ...

    def cameras(self, config: Any) -> list[Camera]:
        """Of a simulated cell they see something once the robot is connected."""

    def scene(self, config: Any) -> Scene:
        """Raises UserError where there is none of the name that ``config`` gives."""

    def check(self, config: Any) -> Iterator[Finding]:
        """Connects, looks at everything, and moves nothing. Raises RobotError where it cannot go on, CellError."""

    def diagnose(self) -> Iterator[Finding]:
        """Does this machine have what it needs? Nothing is connected. A ``detail`` that begins with "optional" is no error."""

    def order(self, config: Any, order: str, person: str) -> list[str]:
        """``stop`` or ``acknowledge``, from anywhere on the arm's machine to the process that drives it; ``config`` None: to all.

        Returns a line for each arm. Raises RobotError where none runs.
        """
