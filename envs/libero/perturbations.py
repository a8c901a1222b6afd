"""Perturbations of LIBERO's episodes along the dimensions of LIBERO-Plus (arXiv 2510.13626).

LIBERO-Plus' layout, which moves objects or adds some, is two here: ``layout`` and ``distractors``.

This module names them and draws what an episode changes in the model that it renders with: camera
and light. ``placement`` moves the arm and the objects, ``distractors`` adds objects,
``background`` exchanges textures, ``rewordings`` changes the instruction and ``sensor_noise`` the
images. docs/libero.md has the ranges and says which of them are LIBERO-Plus's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core import rotations

Array = NDArray[np.float64]

DIMENSIONS = (
    "camera",
    "light",
    "background",
    "layout",
    "language",
    "initial_state",
    "sensor_noise",
    "distractors",
)
SEVERITIES = 5
CAMERA = "agentview"
"""The camera that ``camera`` moves and ``sensor_noise`` degrades, as in LIBERO-Plus."""

AZIMUTH_DEG = 15.0
ELEVATION_DEG = 15.0
DISTANCE = 0.2
TURN_DEG = 2.0
"""Camera: azimuth per severity; elevation in half of the orbits; further away, as a share of the
distance, per severity; turn on the spot, about each of two axes, per severity."""
DIRECTION_DEG = 6.0
BRIGHTNESS = 0.12
TINT = 0.08
SPECULAR = 0.15
"""Light, per severity: turn of each light; share of its intensity; of one colour channel against
the others; and specular intensity."""
SHADOWS_FROM = 3
"""Severity from which on lights cast shadows, which they do not in LIBERO."""
VISUAL = ("cam_pos", "cam_quat", "light_dir", "light_diffuse", "light_specular", "light_castshadow")
"""Fields of MuJoCo's model that camera and light change. The dynamics depend on none of them."""


class Perturbation(NamedTuple):
    """What a suite perturbs."""

    dimension: str
    severity: int
    """1 ... 5; 0: drawn for each episode."""


class Draw(NamedTuple):
    """The random numbers of one episode's perturbation."""

    dimension: str
    severity: int
    random: np.random.RandomState


def draw(perturbation: Perturbation, task: int, seed: int) -> Draw:
    """Return the random numbers of the episode ``seed`` of the suite's task number ``task``.

    They do not depend on the severity: the same episode of a higher severity is perturbed in the
    same direction, further. numpy guarantees the stream of RandomState across its versions.
    """
    random = np.random.RandomState(
        [DIMENSIONS.index(perturbation.dimension), task, seed % 2**32, seed >> 32]
    )
    drawn = 1 + int(random.randint(SEVERITIES))
    return Draw(perturbation.dimension, perturbation.severity or drawn, random)


def look(
    model: Any, drawn: Draw, camera: int, centre: tuple[float, float, float]
) -> dict[str, Any]:
    """Return the fields of MuJoCo's ``model``, by name, that camera or light perturbations change.

    camera: its number. centre: centre of the workspace (m).
    """
    if drawn.dimension == "camera":
        return _moved(model, drawn, camera, np.array(centre))
    return _lit(model, drawn) if drawn.dimension == "light" else {}


def _moved(model: Any, drawn: Draw, camera: int, centre: Array) -> dict[str, Array]:
    """Orbit around the workspace, move away from it, or turn on the spot, one of the three."""
    kind = int(drawn.random.randint(3))
    random = drawn.random
    severity = drawn.severity
    sides = np.where(random.uniform(size=2) < 0.5, -1.0, 1.0)
    position, quaternion = model.cam_pos.copy(), model.cam_quat.copy()
    arm = position[camera] - centre
    if kind == 0:
        turn = _about("z", sides[0] * AZIMUTH_DEG * severity)
        if sides[1] > 0:
            turn = rotations.multiply(turn, _about("y", -ELEVATION_DEG))
        position[camera] = centre + rotations.matrix(turn) @ arm
        quaternion[camera] = rotations.multiply(turn, quaternion[camera])
    elif kind == 1:
        position[camera] = centre + (1 + DISTANCE * severity) * arm
    else:
        turn = rotations.multiply(
            _about("y", sides[1] * TURN_DEG * severity), _about("z", sides[0] * TURN_DEG * severity)
        )
        quaternion[camera] = rotations.multiply(turn, quaternion[camera])
    return {"cam_pos": position, "cam_quat": quaternion}


def _lit(model: Any, drawn: Draw) -> dict[str, Any]:
    """Turn all lights, brighten or dim them, tint them, and let them cast shadows."""
    random, severity = drawn.random, drawn.severity
    azimuth, brighter, channel, warmer, glossier = random.uniform(0, 360), *random.uniform(size=4)
    axis = rotations.matrix(_about("z", azimuth))[:, 0]
    turn = rotations.matrix(rotations.from_vector(np.deg2rad(DIRECTION_DEG * severity) * axis))
    tint = np.ones(3)
    tint[int(3 * channel)] += TINT * severity * (1 if warmer < 0.5 else -1)
    diffuse = (
        model.light_diffuse * tint * (1 + BRIGHTNESS * severity * (1 if brighter < 0.5 else -1))
    )
    specular = model.light_specular * (1 + SPECULAR * severity * (1 if glossier < 0.5 else -1))
    return {
        "light_dir": model.light_dir @ turn.T,
        "light_diffuse": np.clip(diffuse, 0, None),
        "light_specular": specular,
        "light_castshadow": np.full_like(model.light_castshadow, severity >= SHADOWS_FROM),
    }


def _about(axis: str, degrees: float) -> rotations.Quaternion:
    """Return the rotation about a world axis."""
    return rotations.from_vector([np.deg2rad(degrees) * (axis == letter) for letter in "xyz"])
