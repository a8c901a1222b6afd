"""Convert images, proprioception and gripper signs from LIBERO to the options of a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core.rotations import axis_angle

FLIPS = ("upright", "rot180", "none")
STATES = ("quaternion", "axis_angle")
GRIPPERS = {"plus_opens": "open_positive", "minus_opens": "close_positive"}
"""Choices of ``env.gripper`` -> what ``Convention.gripper`` calls them."""
STORED = 50
"""Initial states that LIBERO stores of every task."""
TRANSLATION_M, ROTATION_RAD = 0.05, 0.5
"""Motion that 1 means in an action of robosuite's OSC_POSE."""


def native(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``Convention`` for the options ``flip``, ``state`` and ``gripper``."""
    meaning = {
        "gripper": GRIPPERS[options["gripper"]],
        "state": options["state"],
        "images": options["flip"],
    }
    return meaning | {"tool": [TRANSLATION_M, ROTATION_RAD]}


def flipped(image: NDArray[np.uint8], flip: str) -> NDArray[np.uint8]:
    """Return ``image`` ``[H, W, 3]``, rendered by OpenGL with the bottom row first, flipped."""
    return {"upright": image[::-1], "rot180": image[::-1, ::-1], "none": image}[flip]


def state_vector(
    position: NDArray[Any], quaternion: NDArray[Any], fingers: NDArray[Any], state: str
) -> NDArray[np.float32]:
    """State vector ``[8]``: tool centre point, orientation, fingers.

    Takes a position ``[3]`` (m), a quaternion ``[4]`` (w x y z) and both finger joints ``[2]`` (m,
    the second is negative).
    """
    if state == "quaternion":
        return np.concatenate([position, quaternion, fingers[:1]]).astype(np.float32)
    return np.concatenate([position, axis_angle(quaternion.tolist()), fingers]).astype(np.float32)
