"""Define the interfaces of robots, cameras, scenes and operators; only numpy is needed.

SI units; axes and signs of docs/conventions.md; times: ``time.monotonic()`` of the robot's machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.features.realworld.action_space import Action as Action
from rlinf_vla.features.realworld.action_space import ActionSpace
from rlinf_vla.features.realworld.action_space import Vector as Vector


@dataclass(frozen=True)
class ToolPose:
    position: Vector
    """Tool centre point in the base's frame, metres ``[3]``."""
    quaternion: Vector
    """w, x, y, z, unit length ``[4]``."""


@dataclass(frozen=True)
class ToolTarget:
    """Tool pose and gripper width to reach by the end of the control period."""

    pose: ToolPose
    gripper_width: float | None = None
    """Metres between the fingers; None keeps the current width."""


@dataclass(frozen=True)
class JointTarget:
    """Joint positions to reach by the end of the control period."""

    positions: Vector
    """In the units of the robot's JointSpace ``[J]``."""


Target = ToolTarget | JointTarget


@dataclass(frozen=True)
class RobotState:
    """What every robot measures. A robot with a ToolSpace returns a ToolState."""

    time: float
    """Time of the measurement."""
    joints: Vector
    """Radians, or the units of the robot's JointSpace ``[J]``."""
    joint_velocities: Vector
    """The same per second ``[J]``."""
    commanded: Target | None = field(default=None, kw_only=True)
    """Last target sent to the arm, after all limits; None before the first and at rest."""
    fault: str | None = field(default=None, kw_only=True)
    """Latched fault that stopped the arm, which stands still until an operator acknowledges it."""
    pace: float = field(default=1.0, kw_only=True)
    """Seconds of the arm's clock per second: below 1 in a simulation on a slow machine."""

    @property
    def slow(self) -> str | None:
        """Return what to tell if the arm's clock is slow, else None."""
        return f"the arm's clock runs at {self.pace:.2f} of real time" if self.pace < SLOW else None


@dataclass(frozen=True)
class ToolState(RobotState):
    """State of one arm that is moved by its tool."""

    pose: ToolPose
    wrench: Vector
    """Wrench at the tool in the base's frame: force in N ``[3]``, then torque in Nm ``[3]``."""
    gripper_width: float
    """Metres between the fingers."""
    holding: bool = field(default=False, kw_only=True)
    """Whether the fingers have closed on an object and press on it."""


SLOW = 0.9
"""A pace below this is reported."""


@dataclass(frozen=True)
class Intervention:
    """One change of a command by a safety limit."""

    time: float
    rule: str
    """Key of the limit in the cell file, and the joint if it is of one."""
    before: float
    """Requested value, in the rule's unit."""
    after: float


@dataclass(frozen=True)
class RobotSpec:
    name: str
    control_hz: float
    """Rate of the policy's actions in Hz."""
    lag_s: float
    """Maximum delay between a target and the arm reaching it in free motion."""
    space: ActionSpace
    """What actions and states are; it also says how many joints and arms there are."""


STOPPED_BY, PAUSED_BY, POLICY = "stopped by ", "paused by ", "policy: "
"""Beginnings of faults: a person's stop, an operator's pause, and what the policy's process says
(also before the pause)."""


def stopped_by_a_person(fault: str) -> bool:
    """Return whether a person stopped the arm: then no script may release it."""
    return fault.removeprefix(POLICY).startswith((STOPPED_BY, PAUSED_BY))


class Robot(Protocol):
    """One arm, or several that move together.

    Only ``connect``, ``home`` and ``close`` may block for a control period or longer.

    A separate process moves the arm: it smooths targets to the servo rate within the cell's limits,
    stops the arm when targets cease, and latches faults. Raises RobotError for failures at the
    robot and CellError for a mistake in the cell file.
    """

    spec: RobotSpec

    def connect(self, timeout_s: float) -> None: ...

    def observe(self) -> RobotState:
        """Return the newest measured state; its ``time`` tells its age."""

    def command(self, target: Target, valid_until: float) -> None:
        """Move towards ``target``; decelerate and hold if no new target arrives by ``valid_until``.
        Raises RobotError while a fault is latched."""

    def interventions(self) -> list[Intervention]:
        """Return the changes by safety limits since the last call."""

    def stop(self, why: str) -> None:
        """Decelerate and hold; latch ``why`` unless a fault is. Always possible, idempotent."""

    def acknowledge(self, operator: str) -> None:
        """Clear the latched fault that was observed last; a person's stop that came later remains.
        Called only on an operator's word."""

    def home(self, timeout_s: float, objection: Callable[[], str | None] = lambda: None) -> None:
        """Move slowly to the rest position. ``objection`` is polled: a reason that it returns stops
        the arm and is latched."""

    def close(self) -> None:
        """Disconnect; the arm stands still afterwards. Idempotent."""


@runtime_checkable
class Timed(Protocol):
    """A robot that reports the duration of its code sections, such as ``safety``."""

    def timings(self) -> dict[str, list[float]]:
        """Return the seconds of each call by section, since the last call of this method."""


class RobotError(Failure):
    """A failure of the arm or of devices at the robot; one line that names it."""


CONTACTS = ("max_force_n:", "max_torque_n_m:", "max_deviation:", "reflex:")
"""Beginnings of faults that an action causes, by what it presses against."""


@dataclass(frozen=True)
class Frame:
    """One camera image."""

    time: float
    """Time of the exposure."""
    number: int
    image: NDArray[np.uint8]
    """RGB, upright ``[H, W, 3]``."""


class CellError(UserError):
    """A mistake in a cell file; one line: what is wrong, where, and the fix."""


class Camera(Protocol):
    name: str

    def start(self) -> None: ...

    def latest(self) -> Frame:
        """Return the newest frame at once. Raises CameraError if it is too old or frozen."""

    def close(self) -> None: ...


class CameraError(RobotError):
    pass


class Scene(Protocol):
    """Initial layout, task and success test of episodes at a robot."""

    task: str
    """Name of the task in results."""
    by_hand: bool
    """The operator lays out each episode and then gives the word ``resume``."""
    has_expert: bool
    instructions: tuple[str, ...]
    """All instructions that ``arrange`` can return; empty: not known in advance."""

    def arrange(self, seed: int) -> str:
        """Lay out the episode of this seed, with the arm at home; return its instruction.
        Raises RobotError."""

    def succeeded(self, state: RobotState) -> bool | None:
        """Return whether the task is solved now; None leaves it to the operator or a classifier.
        Called at every control step, so it never blocks."""

    def expert(self, state: RobotState) -> Action | None:
        """Return the expert's action for this state alone; None without one, or after its last."""


SUCCESS, FAILURE, PAUSE, RESUME, QUIT, ACKNOWLEDGE = WORDS = (
    "success",
    "failure",
    "pause",
    "resume",
    "quit",
    "acknowledge",
)
"""Words of an operator. Success and failure end the episode; acknowledge clears a latched fault."""


class Operator(Protocol):
    """Human operator with a teleoperation device. No method blocks."""

    @property
    def name(self) -> str: ...

    def action(self, hand: float) -> Action | None:
        """Return the operator's action in a takeover, else None. ``hand``: gripper value of the
        previous action, kept unless the operator changes it."""

    def words(self) -> list[str]:
        """Return the words given since the last call, each one of WORDS."""

    def close(self) -> None: ...


class OperatorPlugin(Protocol):
    """Entry point group ``rlinf_vla.operators``: one kind of operator device."""

    def __call__(self, device: str | None, dimensions: int) -> Operator:
        """Open the device at this path (None: find one) for actions of a ToolSpace of this size; in
        a JointSpace it gives words only. Raises RobotError if there is none."""


@dataclass(frozen=True)
class Finding:
    """One line of ``rlinf-vla robot check`` or ``rlinf-vla doctor``; ``fix`` says what to do."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


class RobotPlugin(Protocol):
    """Entry point group ``rlinf_vla.robots``. Cheap to import: drivers are loaded on first use."""

    Config: type
    """Dataclass: the typed ``robot`` node of a recipe; has at least ``name``."""
    simulated: bool
    """No real arm can hurt people, so a script may acknowledge faults."""

    def make(self, config: Any) -> Robot: ...

    def cameras(self, config: Any) -> list[Camera]:
        """Return the cell's cameras. Simulated ones deliver images once the robot is connected."""

    def scene(self, config: Any) -> Scene:
        """Return the scene. Raises UserError if the scene that ``config`` names does not exist."""

    def check(self, config: Any) -> Iterator[Finding]:
        """Connect and check everything without motion. Raises RobotError or CellError."""

    def diagnose(self) -> Iterator[Finding]:
        """Check this machine without connecting. A ``detail`` of "optional ..." is no error."""

    def order(self, config: Any, order: str, operator: str) -> list[str]:
        """Send ``stop`` or ``acknowledge`` to the process that drives the arm, from any process on
        its machine; ``config`` None: to all such processes.

        Returns one line per arm. Raises RobotError if no such process runs. An order to all must
        reach each arm once, also if the plug-in is installed under several names.
        """
