"""Which episode of PutOnPlateInScene25 an id means: objects, places, table, wording.

As the tasks of RLinf at a3816b59 (``rlinf/envs/maniskill/tasks/``) number them. Lengths are metres,
in the world's frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PREFIX = "PutOnPlateInScene25"
TRAIN, TEST, ALL = "train", "test", "all"
OBJECT_SETS = (TRAIN, TEST, ALL)
"""Choices of ``obj_set``: what training shows, what only tests show, both."""


class Counts(NamedTuple):
    """How many of each kind there are, and how many of these, the first ones, are in training."""

    in_training: int
    there_are: int

    def of_set(self, which: str) -> range:
        """Return the numbers in a set of OBJECT_SETS."""
        begin = self.in_training if which == TEST else 0
        return range(begin, self.in_training if which == TRAIN else self.there_are)


@dataclass(frozen=True)
class Assets:
    """Numbers of the assets that a folder has."""

    objects: Counts = Counts(16, 25)  # noqa: RUF009  (a tuple)
    tables: Counts = Counts(16, 21)  # noqa: RUF009
    plates: Counts = Counts(1, 17)  # noqa: RUF009
    textures: Counts = Counts(1, 17)  # noqa: RUF009


PUBLISHED = Assets()
WORDINGS = (
    "put {object} on {plate}",
    "Place the {object} on the {plate}",
    "set {object} on {plate}",
    "move the {object} to the {plate}",
    "Take the {object} and put it on the {plate}",
    "pick up {object} and set it down on {plate}",
    "please put the {object} on the {plate}",
    "Put {object} onto {plate}.",
    "place the {object} onto the {plate} surface",
    "Make sure {object} is on {plate}.",
    "on the {plate}, put the {object}",
    "put the {object} where the {plate} is",
    "Move the {object} from the table to the {plate}",
    "Move {object} so it\u2019s on {plate}.",
    "Can you put {object} on {plate}?",
    "{object} on the {plate}, please.",
    "the {object} should be placed on the {plate}.",
)
"""The first is that of training."""
CENTRE = np.array([-0.16, 0.0])
HALF_SIDE = np.array([0.075, 0.075])
REST_QPOS = (-0.01840777, 0.0398835, 0.22242722, -0.00460194, 1.36524296, 0.00153398, 0.037, 0.037)
"""Waist, shoulder, elbow, forearm, wrist (rad), fingers (m)."""
JUMP_STEP = 5
"""Step whose evaluation moves the object of ``PositionChangeTo``."""


@dataclass(frozen=True)
class Kind:
    """What a task draws its episodes from.

    ``set``: those of ``obj_set``; ``train``, ``all``: always these; ``first``: always the first.
    """

    objects: str = TRAIN
    plates: str = "first"
    tables: str = TRAIN
    layout: str = "main"
    extra: str | None = None
    """Meaning of the further number: texture, wording, object, plate, joints."""


TASKS = {
    "Main-v3": Kind(objects="set", tables="set"),
    "MainCarrot-v3": Kind(objects="set", tables="first"),
    "Single-v1": Kind(objects="first", tables="first"),
    "VisionImage-v1": Kind(tables="set"),
    "VisionTexture03-v1": Kind(extra="texture"),
    "VisionTexture05-v1": Kind(extra="texture"),
    "VisionWhole03-v1": Kind(extra="texture"),
    "VisionWhole05-v1": Kind(extra="texture"),
    "Carrot-v1": Kind(objects="set"),
    "Plate-v1": Kind(plates="set"),
    "Instruct-v1": Kind(extra="wording"),
    "MultiCarrot-v1": Kind(objects="set", layout="multi_object", extra="object"),
    "MultiPlate-v1": Kind(plates="set", tables=ALL, layout="multi_plate", extra="plate"),
    "Position-v1": Kind(layout="position"),
    "EEPose-v1": Kind(extra="joints"),
    "PositionChangeTo-v1": Kind(layout="position_change"),
}
"""Published tasks, without PREFIX."""


@dataclass(frozen=True)
class Scene25Episode:
    """Numbers, offsets of the set included; ``extra``: as in ``Kind``, 0 if there is none."""

    object: int
    plate: int
    table: int
    pair: int
    turn: int
    extra: int


class Episodes25:
    """The episodes of a task."""

    def __init__(self, task: str, obj_set: str, assets: Assets = PUBLISHED) -> None:
        self.kind = TASKS[task]
        self.assets = assets
        self.obj_set = obj_set
        kind = self.kind
        self.objects = self._range(kind.objects, assets.objects)
        self.plates = self._range(kind.plates, assets.plates)
        self.tables = self._range(kind.tables, assets.tables)
        self.pairs = range(len(layouts(kind.layout)))
        self.turns = range(4)
        if kind.layout == "position":
            counts = Counts(len(layouts("main")), len(self.pairs)), Counts(4, 8)
            self.pairs, self.turns = (count.of_set(obj_set) for count in counts)
        self.extras = self._extras()

    def _range(self, which: str, counts: Counts) -> range:
        if which == "first":
            return range(1)
        return counts.of_set(self.obj_set if which == "set" else which)

    def _extras(self) -> range:
        """The digit of the further number; for another object or plate it is a distance."""
        extra = self.kind.extra
        if extra == "object":
            return range(len(self.objects) - 1)
        if extra == "plate":
            return range(self._other_plates() - 1)
        of = {
            "texture": self.assets.textures,
            "wording": Counts(1, len(WORDINGS)),
            "joints": Counts(1, len(joint_offsets())),
        }
        return range(1) if extra is None else of[extra].of_set(self.obj_set)

    def _other_plates(self) -> int:
        """Plates among which the second one is."""
        return self.assets.plates.there_are - (self.obj_set == TEST)

    def __len__(self) -> int:
        parts = (self.objects, self.extras, self.plates, self.tables, self.pairs, self.turns)
        return int(np.prod([len(part) for part in parts], dtype=object))

    def __getitem__(self, episode_id: int) -> Scene25Episode:
        """Return the episode of an id, which is taken modulo the number of episodes."""
        extra_first = self.kind.extra != "plate"
        upper = (self.extras, self.plates) if extra_first else (self.plates, self.extras)
        rest = episode_id % len(self)
        digits = list[int]()
        for part in (self.turns, self.pairs, self.tables, *reversed(upper), self.objects):
            rest, digit = divmod(rest, len(part))
            digits.append(digit)
        turn, pair, table, *middle, chosen = digits
        plate, extra = middle if extra_first else reversed(middle)
        return Scene25Episode(
            object=self.objects[chosen],
            plate=self.plates[plate],
            table=self.tables[table],
            pair=self.pairs[pair],
            turn=self.turns[turn],
            extra=self._extra(self.objects[chosen], plate, extra),
        )

    def _extra(self, chosen: int, plate: int, digit: int) -> int:
        extra = self.kind.extra
        if extra is None:
            return 0
        if (
            extra == "object"
        ):  # the published sum contains the object's number, offset and all: it may be the object itself
            return (chosen + digit + 1) % len(self.objects) + self.objects[0]
        if extra == "plate":
            return (plate + digit + 1) % self._other_plates() + self.plates[0]
        return self.extras[digit]


@cache
def layouts(name: str) -> NDArray[np.float64]:
    """Return places ``[K, 2 or 3, 3]`` of the object, the plate, and the third: an object, a plate,
    or where the object is moved to."""
    grid = _places(product((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), repeat=2))
    if name in ("main", "position"):
        height = 0.90 if name == "main" else 0.95
        places = grid if name == "main" else _ring()
        pairs = np.array([pair for pair in product(grid, repeat=2) if _apart(*pair) > 0.070])
        if name == "position":
            pairs = np.concatenate(
                [pairs, [pair for pair in product(places, repeat=2) if _apart(*pair) > 0.070]]
            )
        return _at_heights(pairs, (height, height))
    triples = product(grid, repeat=3)
    if name == "multi_plate":
        arrangements = [
            (a, b, c)
            for a, b, c in triples
            if _apart(a, b) > 0.070 and _apart(a, c) > 0.070 and _apart(b, c) > 0.15
        ]
        return _at_heights(np.array(arrangements), (1.00, 0.92, 0.96))
    arrangements = [
        (a, b, c)
        for a, b, c in triples
        if _apart(a, b) > 0.070 and _apart(c, b) > 0.070 and _apart(a, c) > 0.15
    ]
    return _at_heights(np.array(arrangements), (0.95, 0.92, 1.00))


def _ring() -> NDArray[np.float64]:
    """Places around the grid."""
    side = (-0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    ends = [(-0.2, b) for b in side], [(1.2, b) for b in side]
    between = [(a, b) for a in side[1:-1] for b in (-0.2, 1.2)]
    return _places([*ends[0], *between, *ends[1]])


def _places(
    fractions: Iterator[tuple[float, ...]] | list[tuple[float, float]],
) -> NDArray[np.float64]:
    return (np.array(list(fractions)) * 2 - 1) * HALF_SIDE + CENTRE


def _apart(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(one - other))


def _at_heights(places: NDArray[np.float64], heights: tuple[float, ...]) -> NDArray[np.float64]:
    return np.concatenate(
        [places, np.broadcast_to(np.array(heights)[:, None], (*places.shape[:2], 1))], axis=2
    )


TURNS_DEG = (0.0, 45.0, 90.0, 135.0, -22.5, -67.5, -112.5, -157.5)
"""Of the object about the vertical; the last four are of ``Position`` alone."""


def turned(turn: int) -> tuple[float, float, float, float]:
    """Return a turn of TURNS_DEG as a unit quaternion w x y z."""
    half = np.deg2rad(TURNS_DEG[turn]) / 2
    return float(np.cos(half)), 0.0, 0.0, float(np.sin(half))


@cache
def joint_offsets() -> NDArray[np.float64]:
    """Return what ``EEPose`` adds to REST_QPOS: ``[14376, 8]``, the first row zero."""
    small, large = (-0.15, -0.08, 0.0, 0.08, 0.15), (-0.6, -0.3, 0.0, 0.3, 0.6)
    rows = np.array(list(product(*[small] * 5, large)))
    rows = rows[np.abs(rows[:, 1] + rows[:, 2]) <= 0.25]
    return np.pad(np.concatenate([np.zeros((1, 6)), rows]), ((0, 0), (0, 2)))
