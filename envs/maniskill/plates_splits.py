"""Splits of PutOnPlate25: what an evaluation changes, and how an episode follows from its seed.

The protocol is that of RL4VLA (arXiv 2505.19789) and RLinf-VLA (2510.06710): training has 16 of 25
objects, 1 of 17 receptacles, 16 of 21 table tops, one wording and a grid of places. Each split
changes one of these. ``camera`` is not in the papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from .plates_parts import OBJECTS, RECEPTACLES, SEEN_OBJECTS, SEEN_RECEPTACLES
from .plates_tables import OVERLAYS, SEEN_TABLES, TABLES

Points = NDArray[np.float64]

CENTRE = np.array([-0.03, 0.0])
SIDE = 0.24
POINTS = 6
"""Square of places (x, y), metres, table frame, and its number of points along a side."""
RECEPTACLE_APART, OBJECTS_APART, RECEPTACLES_APART = 0.125, 0.14, 0.15
"""Least distances (m) of an object and a receptacle, of two objects, of two receptacles."""
YAWS = np.arange(4) * np.pi / 4
UNSEEN_YAWS = -np.pi / 8 - np.arange(4) * np.pi / 4
MOVE_STEP = 5
"""Control steps after which ``moved_object`` moves the object."""

WORDING = "put the {} on the {}"
UNSEEN_WORDINGS = (
    "place the {} on the {}",
    "set the {} down on the {}",
    "move the {} to the {}",
    "take the {} and lay it on the {}",
    "pick up the {} and place it on the {}",
    "please put the {} onto the {}",
    "put the {} on top of the {}.",
    "the {} belongs on the {}",
    "make sure that the {} is on the {}",
    "can you put the {} on the {}?",
    "bring the {} over to the {}",
    "grab the {}, then drop it on the {}",
    "I want the {} on the {}",
    "the {} on the {}, please",
    "transfer the {} from the table to the {}",
    "position the {} upon the {}",
)


@dataclass(frozen=True)
class Split:
    """Values that an episode may have; the defaults are those of training."""

    objects: range = range(SEEN_OBJECTS)
    receptacles: range = range(SEEN_RECEPTACLES)
    tables: range = range(SEEN_TABLES)
    wordings: tuple[str, ...] = (WORDING,)
    unseen_places: bool = False
    second_object: bool = False
    second_receptacles: range = range(0)
    """A second receptacle is one of these; none if empty."""
    moves: bool = False
    """The object moves to another place after MOVE_STEP control steps."""
    noise: float = 0.0
    """Share of the image that is an overlay, 0 to 1."""
    foreground: bool = False
    """The overlay is on robot, objects and receptacles alone."""
    camera: bool = False
    robot_pose: bool = False


_UNSEEN_OBJECTS = range(SEEN_OBJECTS, len(OBJECTS))
_UNSEEN_RECEPTACLES = range(SEEN_RECEPTACLES, len(RECEPTACLES))

SPLITS = {
    "main": Split(),
    "unseen_table": Split(tables=range(SEEN_TABLES, TABLES)),
    "texture_weak": Split(noise=0.3, foreground=True),
    "texture_strong": Split(noise=0.5, foreground=True),
    "noise_weak": Split(noise=0.3),
    "noise_strong": Split(noise=0.5),
    "unseen_object": Split(objects=_UNSEEN_OBJECTS),
    "unseen_receptacle": Split(receptacles=_UNSEEN_RECEPTACLES),
    "unseen_instruction": Split(wordings=UNSEEN_WORDINGS),
    "two_objects": Split(second_object=True),
    "two_unseen_objects": Split(objects=_UNSEEN_OBJECTS, second_object=True),
    "two_receptacles": Split(second_receptacles=_UNSEEN_RECEPTACLES),
    "two_unseen_receptacles": Split(
        receptacles=_UNSEEN_RECEPTACLES, second_receptacles=_UNSEEN_RECEPTACLES
    ),
    "position": Split(unseen_places=True),
    "robot_pose": Split(robot_pose=True),
    "moved_object": Split(moves=True),
    "camera": Split(camera=True),
}


@cache
def places(unseen: bool) -> Points:
    """Places ``[P, 2]``: the grid of training, or the ring of points around it."""
    step = SIDE / (POINTS - 1)
    steps = np.arange(-1, POINTS + 1) if unseen else np.arange(POINTS)
    grid = [(x, y) for x, y in product(steps, steps) if not unseen or {x, y} & {-1, POINTS}]
    return np.array(grid) * step - SIDE / 2 + CENTRE


@cache
def pairs(unseen: bool) -> Points:
    """Places ``[K, 2, 2]`` of an object and a receptacle."""
    combinations = [
        (a, b)
        for a, b in product(places(unseen), repeat=2)
        if np.linalg.norm(a - b) > RECEPTACLE_APART
    ]
    return np.array(combinations)


def third_places(split: Split, first: Points, receptacle: Points) -> Points:
    """Places ``[K, 2]`` for a second object, for a second receptacle or to move the object to."""
    from_object, from_receptacle = (
        (RECEPTACLE_APART, RECEPTACLES_APART)
        if split.second_receptacles
        else (OBJECTS_APART, RECEPTACLE_APART)
    )
    points = places(split.unseen_places)
    far = np.linalg.norm(points - first, axis=1) > from_object
    return points[far & (np.linalg.norm(points - receptacle, axis=1) > from_receptacle)]


@dataclass(frozen=True)
class Episode:
    """Everything that the seed determines, besides the noise of the robot's joints."""

    object: int
    receptacle: int
    table: int
    object_place: Points
    receptacle_place: Points
    yaw: float
    """Turn of the objects about the vertical, rad."""
    third_place: Points
    second_object: int | None
    second_receptacle: int | None
    wording: str
    overlay: int
    camera: tuple[float, float]
    """Turns of the camera about the middle of the table: azimuth and elevation, rad."""
    robot_pose: NDArray[np.float64]
    """Offsets ``[7]`` of the joints, rad."""

    @property
    def instruction(self) -> str:
        return self.wording.format(OBJECTS[self.object].name, RECEPTACLES[self.receptacle].name)


CAMERAS = tuple((np.deg2rad(a), np.deg2rad(e)) for a, e in product((-20, -10, 10, 20), (-8, 0, 8)))
ROBOT_POSES = tuple(
    np.array(
        [base, shoulder, 0.0, elbow, 0.0, shoulder - elbow, 0.0]
    )  # the tool keeps pointing down
    for base, shoulder, elbow in product(
        (-0.15, -0.08, 0.0, 0.08, 0.15), (-0.08, 0.0, 0.08), (-0.08, 0.0, 0.08)
    )
    if base or shoulder or elbow
)
DRAWS = 12


def draw(split: Split, rng: np.random.RandomState) -> Episode:
    """Draw an episode.

    Each property has a random number of its own, so episodes of one seed in two splits differ only
    in what the splits change.
    """
    number = rng.random_sample(DRAWS)

    def pick(which: int, count: int) -> int:
        return int(number[which] * count)

    def another(which: int, choices: range, than: int) -> int:
        others = [choice for choice in choices if choice != than]
        return others[pick(which, len(others))]

    first = split.objects[pick(0, len(split.objects))]
    receptacle = split.receptacles[pick(1, len(split.receptacles))]
    first_place, receptacle_place = pairs(split.unseen_places)[
        pick(3, len(pairs(split.unseen_places)))
    ]
    thirds = third_places(split, first_place, receptacle_place)
    return Episode(
        object=first,
        receptacle=receptacle,
        table=split.tables[pick(2, len(split.tables))],
        object_place=first_place,
        receptacle_place=receptacle_place,
        yaw=float((UNSEEN_YAWS if split.unseen_places else YAWS)[pick(4, len(YAWS))]),
        third_place=thirds[pick(5, len(thirds))],
        second_object=another(6, split.objects, first) if split.second_object else None,
        second_receptacle=another(7, split.second_receptacles, receptacle)
        if split.second_receptacles
        else None,
        wording=split.wordings[pick(8, len(split.wordings))],
        overlay=pick(9, OVERLAYS),
        camera=CAMERAS[pick(10, len(CAMERAS))] if split.camera else (0.0, 0.0),
        robot_pose=ROBOT_POSES[pick(11, len(ROBOT_POSES))] if split.robot_pose else np.zeros(7),
    )
