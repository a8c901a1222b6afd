"""What is known of Meta-World's simulator before it starts."""

from __future__ import annotations

from typing import Any

from ..serving import PICTURE_SIZE
from ..shared_arrays import SimulatorSpec
from .config import STATES

STEP_HZ = 80.0
TRANSLATION_M = 0.01
"""Motion of the hand's target that 1 means in an action, per step of Meta-World."""


def outline(options: dict[str, Any]) -> SimulatorSpec:
    """Return the spec of a ``MetaWorldSimulator`` with these options, but for its stack."""
    units = [TRANSLATION_M * options["action_repeat"], 0.0]
    common, tool = options["convention"] == "common", options["state"] == "tool"
    return SimulatorSpec(
        action_dim=4,
        state_dim=STATES[options["state"]],
        control_hz=STEP_HZ / options["action_repeat"],
        images=dict.fromkeys(options["cameras"], [options["image_size"]] * 2),
        picture=[PICTURE_SIZE] * 2,
        tool=units if common and tool else None,
        native={
            "tool": units,
            "gripper": "open_positive" if common else "close_positive",
            "state": "quaternion" if tool else options["state"],
            "images": "upright",
        },
        instructions=list(dict.fromkeys(options["tasks"].values())),
    )
