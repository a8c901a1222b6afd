"""What the cells of all arms have in common: rates and time limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from rlinf_vla.features.realworld.robot import CellError

from .smoothing import Windows

SLOWEST_STOP_S = 1.0
"""A slower stop offers no protection."""


def number(low: float, high: float, length: int | None = None) -> Any:
    """Return a field for a number in this range, or for ``length`` such numbers."""
    return field(metadata={"low": low, "high": high, "length": length})


def unbounded() -> Any:
    """Return a field for what is no number."""
    return field()


@dataclass(frozen=True)
class ArmCell(ABC):
    """Each field is a key of the cell file, with its range as metadata."""

    name: str
    """File name without suffix."""

    servo_hz: float = number(20, 1000)
    """Rate of commands to the arm."""
    control_hz: float = number(1, 100)
    """Rate of the policy's goals; divides servo_hz."""
    connect_timeout_s: float = number(0.1, 60)
    heartbeat_timeout_s: float = number(0.02, 2)
    """Stop and latch a fault after this long without a message from the policy's process."""
    max_goal_validity_s: float = number(0.02, 2)
    """Longest time for which a goal is pursued, whatever its ``valid_until``."""
    expired_goals_to_stop: float = number(1, 100)
    """Stop and latch a fault after this many consecutive goals expired before the next arrived."""
    max_state_age_s: float = number(0.002, 0.5)
    """A measured state older than this is a fault."""

    @property
    def ticks_per_step(self) -> int:
        """Servo ticks per control period."""
        return round(self.servo_hz / self.control_hz)

    @property
    @abstractmethod
    def windows(self) -> Windows:
        """Averaging windows that keep acceleration and jerk within limits."""

    @property
    def stop_time_s(self) -> float:
        """Longest time from the last goal to standstill of the command."""
        return self.windows.length / self.servo_hz


def check_timing(cell: ArmCell) -> None:
    """Raise CellError if rates or time limits contradict each other."""
    if abs(cell.servo_hz / cell.control_hz - cell.ticks_per_step) > 1e-9:
        raise CellError(
            f"servo_hz: {cell.servo_hz:g} is not a multiple of control_hz {cell.control_hz:g}; make it one"
        )
    if cell.expired_goals_to_stop % 1:
        raise CellError(
            f"expired_goals_to_stop: {cell.expired_goals_to_stop:g} is a number of goals; write a whole number"
        )
    if cell.max_goal_validity_s < 1 / cell.control_hz:
        raise CellError(
            f"max_goal_validity_s: {cell.max_goal_validity_s:g} s is below one control period, {1 / cell.control_hz:g} s; raise it"
        )
