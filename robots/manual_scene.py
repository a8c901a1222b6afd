"""Scene that the operator arranges by hand and reports success or failure of."""

from __future__ import annotations

from rlinf_vla.core.robot import Action, RobotState


class ManualScene:
    """Implements ``Scene``."""

    task, by_hand, has_expert = "ManualScene", True, False

    def __init__(self, instruction: str) -> None:
        self._instruction = instruction

    def arrange(self, seed: int) -> str:
        return self._instruction

    def succeeded(self, state: RobotState) -> bool | None:
        return None

    def expert(self, state: RobotState) -> Action | None:
        return None
