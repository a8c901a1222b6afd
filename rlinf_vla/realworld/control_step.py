"""Records that a control loop reports: one per step, and one for its end."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_vla.core.robot import Intervention, ToolTarget
from rlinf_vla.realworld.chunks import Actions, Chosen
from rlinf_vla.realworld.loop_statistics import HUMAN
from rlinf_vla.realworld.sensing import Reading

FINISHED, MISSED, FAULT, CAMERA, ROBOT, INVALID = "finished", "missed deadlines", "fault", "camera", "robot", "invalid action"


@dataclass(frozen=True)
class Ended:
    """Why a run ended. kind: FINISHED or the failure; after a failure the robot stands until an
    operator acknowledges it."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Step:
    """One control step.

    by: whose action was executed, ``policy`` or ``human``; ``held`` and ``starting`` sent no
    command. time: its end, in clock seconds. chosen: source of the policy's action. action: ``[D]``
    as executed, from policy or operator.
    """

    tick: int
    time: float
    seen: Reading
    by: str
    chosen: Chosen | None
    action: Actions | None
    target: ToolTarget | None
    interventions: list[Intervention]

    @property
    def human(self) -> bool:
        return self.by == HUMAN
