"""A scene that a person lays out, and judges."""

from __future__ import annotations

from rlinf_vla.robot import Action, RobotState


class ByHand:
    task, by_hand, has_expert = "ByHand", True, False

    def __init__(self, instruction: str) -> None:
        self._instruction = instruction

    def arrange(self, seed: int) -> str:
        return self._instruction

    def succeeded(self, state: RobotState) -> bool | None:
        return None

    def expert(self, state: RobotState) -> Action | None:
        return None
