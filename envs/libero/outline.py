"""What is known of LIBERO's simulator before it starts."""

from __future__ import annotations

from typing import Any

from ..serving import PICTURE_SIZE
from ..shared_arrays import SimulatorSpec
from .conventions import ROTATION_RAD, STORED, TRANSLATION_M, native
from .episode import CONTROL_HZ
from .perturbations import SEVERITIES
from .rewordings import rewordings


def outline(options: dict[str, Any]) -> SimulatorSpec:
    """Return the spec of a ``LiberoSimulator`` with these options, but for its stack."""
    tasks = options["tasks"]
    return SimulatorSpec(
        action_dim=7,
        state_dim=8,
        control_hz=float(CONTROL_HZ),
        images=dict.fromkeys(options["cameras"], [options["image_size"]] * 2),
        picture=[PICTURE_SIZE] * 2,
        tool=[TRANSLATION_M, ROTATION_RAD] if options["tool"] else None,
        native=native(options),
        instructions=list(
            dict.fromkeys(instruction for task in tasks for instruction in instructions(task))
        ),
        starts=STORED
        if options["stored_below"] is None and any(task["perturbation"] is None for task in tasks)
        else None,
    )


def instructions(task: dict[str, Any]) -> list[str]:
    """All instructions that episodes of a task may have."""
    if task["perturbation"] is None or task["perturbation"][0] != "language":
        return [task["instruction"]]
    severity = task["perturbation"][1]
    severities = [severity] if severity else range(1, SEVERITIES + 1)
    return [
        wording for severity in severities for wording in rewordings(task["instruction"], severity)
    ]
