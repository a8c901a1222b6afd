"""Describe what the actions and states of a robot are: motions of a tool, or positions of joints.

Only numpy is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Action = NDArray[np.float32]
"""``[D]``, as the robot's action space says."""

MAX_ACTION = 10.0
"""Largest accepted number of an action whose nominal range is [-1, 1]. Larger ones are wrong units:
one metre is 10 to 50 times a full action."""
OPEN = 1.0
"""Number that opens a gripper; -1 closes it."""


@dataclass(frozen=True)
class ToolSpace:
    """Actions move the tool of one arm and set its gripper: docs/conventions.md.

    The state is position, quaternion and one finger.
    """

    translation_m: float
    """Metres that an action with (dx, dy, dz) of length 1 moves the tool."""
    rotation_rad: float
    """Radians that an action with (rx, ry, rz) of length 1 turns the tool."""
    gripper_width_m: float
    """Maximum distance between the fingers."""

    sizes: ClassVar[tuple[int, ...]] = (4, 7)
    """Possible sizes of an action: without and with (rx, ry, rz)."""
    state_size: ClassVar[int] = 8
    joint_names: ClassVar[None] = None

    def accepts(self, action: Action) -> bool:
        """Return whether the numbers can be an action; NaN cannot."""
        return bool((np.abs(action) <= MAX_ACTION).all())

    def hold(self, size: int, last: Action | None, joints: Vector) -> Action:
        """Return the action of this size that moves nothing; the gripper is as in ``last``."""
        return np.array(
            [0.0] * (size - 1) + [OPEN if last is None else float(last[-1])], np.float32
        )


@dataclass(frozen=True)
class JointSpace:
    """Actions are positions of all joints, or changes of these; a gripper is a joint.

    The state is the position of each joint. Positions are in the units of the robot's driver, which
    are LeRobot's for a LeRobot robot: degrees, and 0 to 100 for a gripper (100 is open). Two arms
    are one space with the joints of both.
    """

    joint_names: tuple[str, ...]
    lower: tuple[float, ...]
    """Limits of each joint."""
    upper: tuple[float, ...]
    step: tuple[float, ...]
    """Largest change of each joint's target in one control step."""
    grippers: tuple[str, ...]
    """Names of the joints that are grippers."""
    relative: bool
    """True: an action is in [-1, 1]: for a gripper -1 is ``lower`` and 1 is ``upper``, for another
    joint 1 is a change by ``step``. False: an action is the positions themselves."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.state_size,)

    @property
    def state_size(self) -> int:
        return len(self.joint_names)

    @property
    def is_gripper(self) -> NDArray[np.bool_]:
        """Whether each joint is a gripper ``[J]``."""
        return np.array([name in self.grippers for name in self.joint_names])

    def accepts(self, action: Action) -> bool:
        """As for ToolSpace. A position may be outside the limits by their distance."""
        if self.relative:
            return bool((np.abs(action) <= MAX_ACTION).all())
        lower, upper = np.array(self.lower), np.array(self.upper)
        return bool(((action >= 2 * lower - upper) & (action <= 2 * upper - lower)).all())

    def hold(self, size: int, last: Action | None, joints: Vector) -> Action:
        """As for ToolSpace; ``joints``: measured positions ``[J]``."""
        if not self.relative:
            return np.array(joints if last is None else last, np.float32)
        gripper = OPEN if last is None else last
        return np.where(self.is_gripper, gripper, 0.0).astype(np.float32)


ActionSpace = ToolSpace | JointSpace
