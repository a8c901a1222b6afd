"""Data model of a scene file, and the random layout of an episode.

Units are metres, kilograms and degrees. Axes are those of the robot's base; z = 0 is the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = tuple[float, ...]
Interval = tuple[float, float]

TARGET = "target"
"""In a predicate, the object drawn from ``Scene.target``; in an instruction, ``{target}``."""

COLOURS: dict[str, Vector] = {
    "red": (0.9, 0.05, 0.05),
    "green": (0.05, 0.75, 0.1),
    "blue": (0.05, 0.15, 0.95),
    "yellow": (0.95, 0.85, 0.05),
    "orange": (0.95, 0.5, 0.05),
    "purple": (0.5, 0.1, 0.7),
    "white": (0.95, 0.95, 0.95),
    "grey": (0.5, 0.5, 0.5),
    "black": (0.1, 0.1, 0.1),
    "brown": (0.45, 0.28, 0.12),
}

PLACEMENT_TRIES = 10_000
OPEN_M = 0.037
"""Finger position beyond which the gripper counts as open: nothing wider can be grasped."""
GRASP_YAW_DEG = 30.0
"""Largest yaw of a box that fits between the fingers, which the expert never turns."""


@dataclass(frozen=True)
class Box:
    size_m: Vector
    """Length, width and height."""


@dataclass(frozen=True)
class Sphere:
    radius_m: float


@dataclass(frozen=True)
class Cylinder:
    """Upright cylinder."""

    radius_m: float
    height_m: float


@dataclass(frozen=True)
class Mesh:
    file: str
    """Absolute path of an obj, stl or ply file, z up."""
    scale: float
    size_m: Vector
    """Length, width and height of its bounding box, scaled."""
    middle_m: Vector
    """Centre of its bounding box in the file's frame, scaled."""
    volume_m3: float
    """Scaled."""


Shape = Box | Sphere | Cylinder | Mesh


@dataclass(frozen=True)
class Region:
    """Intervals [low, high] of the position of an object's centre."""

    x_m: Interval
    y_m: Interval
    z_m: Interval | None = None


@dataclass(frozen=True)
class SceneObject:
    """An object; without z it stands on the table."""

    shape: Shape
    place: Vector | Region
    """Centre (x, y) or (x, y, z), or the region from which an episode draws it."""
    colour: Vector = COLOURS["grey"]
    mass_kg: float = 0.1
    yaw_deg: Interval = (0.0, 0.0)
    """Interval of the yaw about the vertical axis."""
    fixed: bool = False
    collision: bool = True

    @property
    def half_m(self) -> NDArray[np.float64]:
        """``[3]``: half the length, width and height of the enclosing box."""
        shape = self.shape
        if isinstance(shape, Sphere):
            return np.full(3, shape.radius_m)
        if isinstance(shape, Cylinder):
            return np.array([shape.radius_m, shape.radius_m, shape.height_m / 2])
        return np.array(shape.size_m) / 2


@dataclass(frozen=True)
class Camera:
    eye_m: Vector
    target_m: Vector
    fov_deg: float = 50.0
    """Vertical field of view."""


@dataclass(frozen=True)
class Robot:
    tool_m: Vector = (0.45, 0.0, 0.3)
    """Start of the tool centre point, pointing down with open fingers."""
    jitter_rad: float = 0.02
    """Standard deviation of the noise on the initial joint angles."""
    kind: str = "panda"


@dataclass(frozen=True)
class On:
    """``above`` rests on ``below`` and is released."""

    above: str
    below: str


@dataclass(frozen=True)
class Lifted:
    object: str
    height_m: float
    """Height of the object's lowest point above the table."""


@dataclass(frozen=True)
class Inside:
    """The object's centre is in the region; without z_m, it must also be at rest and released."""

    object: str
    region: Region


Predicate = On | Lifted | Inside


@dataclass(frozen=True)
class Scene:
    name: str
    instruction: str
    things: dict[str, SceneObject]
    cameras: dict[str, Camera]
    success: tuple[Predicate, ...]
    """Predicates that must hold at the same time."""
    episode_limit: int = 100
    robot: Robot = Robot()
    target: tuple[str, ...] = ()
    """Objects from which each episode draws one."""
    apart_m: float = 0.0
    """Smallest horizontal distance between object centres, where a region leaves a choice."""

    def told(self, target: int) -> str:
        """Instruction of an episode that drew ``Scene.target[target]``."""
        if not self.target:
            return self.instruction
        return self.instruction.replace("{" + TARGET + "}", self.target[target].replace("_", " "))


def subject(predicate: Predicate) -> str:
    """Name of the object that the predicate wants moved."""
    return predicate.above if isinstance(predicate, On) else predicate.object


def why_no_expert(scene: Scene) -> str | None:
    """Return why the expert cannot grasp an object that a predicate names; None if it can."""
    for predicate in scene.success:
        name = subject(predicate)
        for key in scene.target if name not in scene.things else (name,):
            thing = scene.things[key]
            turned = (
                not isinstance(thing.shape, Sphere | Cylinder)
                and max(map(abs, thing.yaw_deg)) > GRASP_YAW_DEG
            )
            if thing.half_m[1] > OPEN_M - 0.002 or turned:
                return f"the scripted expert grasps along y, up to {2 * OPEN_M:.3f} m: {key} of the scene {scene.name} is wider or turned"
    return None


@dataclass(frozen=True)
class Layout:
    """Random layout of an episode with ``K`` objects."""

    target: int
    """Index into ``Scene.target``; 0 without targets."""
    centre: NDArray[np.float64]
    """``[K, 3]``"""
    yaw: NDArray[np.float64]
    """``[K]`` radians."""
    jitter: NDArray[np.float64]
    """``[7]``: noise of the arm's joints, radians."""


class NoRoom(Exception):
    """The objects do not fit into their regions at the required distance."""


def draw(scene: Scene, seed: int) -> Layout:
    """Draw the layout of the episode with this seed. Raises NoRoom."""
    rng = np.random.RandomState(seed)  # the only generator whose stream numpy guarantees
    target = int(rng.randint(len(scene.target))) if scene.target else 0
    jitter = scene.robot.jitter_rad * rng.normal(size=7)
    things = list(scene.things.values())
    yaw = np.radians([rng.uniform(*thing.yaw_deg) for thing in things])
    solid = np.array([thing.collision for thing in things], dtype=bool)
    drawn = np.array([isinstance(thing.place, Region) for thing in things], dtype=bool)
    matters = np.triu(np.outer(solid, solid), 1) & (drawn[:, None] | drawn[None])
    for _ in range(PLACEMENT_TRIES):
        centre = np.array([_centre(thing, rng) for thing in things]).reshape(-1, 3)
        distance = np.linalg.norm(centre[:, None, :2] - centre[None, :, :2], axis=-1)
        if distance[matters].min(initial=np.inf) >= scene.apart_m:
            return Layout(target, centre, yaw, jitter)
    raise NoRoom(
        f"no layout keeps the objects {scene.apart_m} m apart: widen their regions or lower apart_m"
    )


def _centre(thing: SceneObject, rng: np.random.RandomState) -> list[float]:
    standing = float(thing.half_m[2])
    position = thing.place
    if isinstance(position, Region):
        z = rng.uniform(*position.z_m) if position.z_m else standing
        return [rng.uniform(*position.x_m), rng.uniform(*position.y_m), z]
    return [*position, standing] if len(position) == 2 else list(position)
