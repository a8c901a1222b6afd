"""What a control loop tells of every step, and of its end."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_vla.robot import Intervention, ToolTarget
from rlinf_vla.rollout.accounting import HUMAN
from rlinf_vla.rollout.chunks import Actions, Chosen
from rlinf_vla.rollout.sensing import Seen

FINISHED, MISSED, FAULT, CAMERA, ROBOT, INVALID = "finished", "missed deadlines", "fault", "camera", "robot", "invalid action"


@dataclass(frozen=True)
class Ended:
    """Why a run ended. kind: FINISHED, or what went wrong; the robot stands still then, and waits for a person."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Step:
    """One control step. by: ``policy`` or ``human``; ``held`` and ``starting`` had no command. time: when it was over, in the clock's
    seconds. chosen: where the policy's action came from. action ``[D]``: what was executed, whoever chose it."""

    tick: int
    time: float
    seen: Seen
    by: str
    chosen: Chosen | None
    action: Actions | None
    target: ToolTarget | None
    interventions: list[Intervention]

    @property
    def human(self) -> bool:
        return self.by == HUMAN
