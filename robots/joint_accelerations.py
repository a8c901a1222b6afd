"""Bound the joint accelerations of an ideal follower by the joint speeds of its reference.

The command is an average of past reference points. As far as joints are linear in the tool's pose,
the follower's joints are the same average of the reference's joints, so their acceleration is a
mean of ``(speed now - speed first ticks ago) / (first t)`` (``smoothing.py``). It is within a limit
if no two such speeds differ by more than ``first t`` times the limit. No speed is larger than that,
so the reference may stop in every state.
"""

from __future__ import annotations

import numpy as np

from rlinf_vla.features.realworld.robot import Vector

from . import kinematics
from .smoothing import Windows

SHARE = 0.9
"""Share of the joints' largest acceleration that is used: joints are not quite linear."""


class JointAccelerations:
    """Remember the joint speeds of the reference, and say which may follow."""

    def __init__(self, windows: Windows, servo_hz: float) -> None:
        self._past = np.zeros((windows.first, 7))
        """rad/s in the last ticks, the oldest first."""
        self._most = SHARE * kinematics.ACCELERATION_RAD_S2 * windows.first / servo_hz

    def rest(self) -> None:
        """Restart as if the joints had always stood still."""
        self._past[:] = 0

    def push(self, speeds: Vector) -> None:
        """Add the speeds of a tick, rad/s ``[7]``."""
        self._past[:-1] = self._past[1:]
        self._past[-1] = speeds

    def range(self, ticks: int) -> tuple[Vector, Vector]:
        """Return each joint's lowest and highest speed in the next ``ticks``, rad/s ``[7]``."""
        past = self._past[:ticks]  # from these the coming ones are subtracted
        return np.maximum(past.max(axis=0), 0) - self._most, np.minimum(
            past.min(axis=0), 0
        ) + self._most
