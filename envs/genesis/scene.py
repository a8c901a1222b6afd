"""What a scene file describes. Metres, kilograms, degrees; the axes are those of the robot's base, and z = 0 is the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = tuple[float, ...]
Interval = tuple[float, float]

TARGET = "target"
"""In a predicate: the object that the episode drew from ``Scene.target``. In an instruction: ``{target}``, its name."""

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


@dataclass(frozen=True)
class Box:
    size_m: Vector
    """Length, width, height."""


@dataclass(frozen=True)
class Sphere:
    radius_m: float


@dataclass(frozen=True)
class Cylinder:
    """Upright."""

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
    """Of its bounding box, in the file's own frame, scaled."""
    volume_m3: float
    """Scaled."""


Shape = Box | Sphere | Cylinder | Mesh


@dataclass(frozen=True)
class Region:
    """Intervals [low, high] of an object's centre."""

    x_m: Interval
    y_m: Interval
    z_m: Interval | None = None


@dataclass(frozen=True)
class Thing:
    """An object. Where z is not said it stands on the table."""

    shape: Shape
    place: Vector | Region
    """(x, y) or (x, y, z) of its centre, or where an episode draws it from."""
    colour: Vector = COLOURS["grey"]
    mass_kg: float = 0.1
    yaw_deg: Interval = (0.0, 0.0)
    """Interval, about the vertical."""
    fixed: bool = False
    collision: bool = True

    @property
    def half_m(self) -> NDArray[np.float64]:
        """``[3]`` half the length, width and height of what encloses it."""
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
    """Vertical."""


@dataclass(frozen=True)
class Robot:
    tool_m: Vector = (0.45, 0.0, 0.3)
    """Where the tool centre point starts, pointing down, fingers open."""
    jitter_rad: float = 0.02
    """Standard deviation of the arm's joints about that."""
    kind: str = "panda"


@dataclass(frozen=True)
class On:
    """``above`` rests on ``below``, and the gripper has let go of it."""

    above: str
    below: str


@dataclass(frozen=True)
class Lifted:
    object: str
    height_m: float
    """Of its lowest point above the table."""


@dataclass(frozen=True)
class Inside:
    """The object's centre is in the region; where that names no heights, it rests there and the gripper has let go of it."""

    object: str
    region: Region


Predicate = On | Lifted | Inside


@dataclass(frozen=True)
class Scene:
    name: str
    instruction: str
    episode_limit: int
    things: dict[str, Thing]
    cameras: dict[str, Camera]
    success: tuple[Predicate, ...]
    """All of them at once."""
    robot: Robot = Robot()
    target: tuple[str, ...] = ()
    """Objects of which each episode draws one."""
    apart_m: float = 0.0
    """Least distance between the centres of two objects, seen from above, where a region leaves a choice."""

    def example(self) -> str:
        """The instruction of some episode."""
        return self.told(0)

    def told(self, target: int) -> str:
        """The instruction where ``Scene.target[target]`` was drawn."""
        if not self.target:
            return self.instruction
        return self.instruction.replace("{" + TARGET + "}", self.target[target].replace("_", " "))


@dataclass(frozen=True)
class Layout:
    """What an episode draws: ``K`` objects."""

    target: int
    """Index into ``Scene.target``; 0 where there is none."""
    centre: NDArray[np.float64]
    """``[K, 3]``"""
    yaw: NDArray[np.float64]
    """``[K]`` radians."""
    jitter: NDArray[np.float64]
    """``[7]`` radians, of the arm's joints."""


class Crowded(Exception):
    """The objects do not fit into their regions at the distance asked for."""


def draw(scene: Scene, seed: int) -> Layout:
    """The layout of the episode ``seed``. Raises Crowded."""
    rng = np.random.RandomState(seed)  # the one generator whose stream numpy froze
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
    raise Crowded(f"no layout keeps the objects {scene.apart_m} m apart: widen their regions or lower apart_m")


def _centre(thing: Thing, rng: np.random.RandomState) -> list[float]:
    standing = float(thing.half_m[2])
    place = thing.place
    if isinstance(place, Region):
        z = rng.uniform(*place.z_m) if place.z_m else standing
        return [rng.uniform(*place.x_m), rng.uniform(*place.y_m), z]
    return [*place, standing] if len(place) == 2 else list(place)
