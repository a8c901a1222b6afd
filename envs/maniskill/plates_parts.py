"""Objects and receptacles of PutOnPlate25: names, and the primitives that they are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Vector = tuple[float, float, float]

RED, GREEN, BLUE = (0.85, 0.05, 0.05), (0.05, 0.6, 0.1), (0.05, 0.15, 0.9)
YELLOW, ORANGE, PURPLE = (0.95, 0.8, 0.05), (0.95, 0.4, 0.02), (0.4, 0.05, 0.55)
WHITE, BLACK, GREY = (0.93, 0.93, 0.93), (0.03, 0.03, 0.03), (0.4, 0.4, 0.42)
BROWN, TAN, PINK = (0.35, 0.15, 0.05), (0.8, 0.55, 0.3), (0.95, 0.4, 0.6)
CYAN, LIME, SILVER = (0.05, 0.75, 0.8), (0.5, 0.85, 0.1), (0.7, 0.72, 0.75)


@dataclass(frozen=True)
class Part:
    """One primitive. Lengths are in metres; ``at`` is its centre, and z = 0 is the table."""

    shape: str
    """``box``, ``cylinder`` (its axis upright), ``sphere`` or ``capsule`` (its axis along x)."""
    size: tuple[float, ...]
    """Half sizes of a box; radius of a sphere; radius and half length of the others."""
    at: Vector
    colour: Vector

    @property
    def half(self) -> Vector:
        """Half of the bounding box along x, y and z."""
        if self.shape == "box":
            return self.size[0], self.size[1], self.size[2]
        radius = self.size[0]
        if self.shape == "cylinder":
            return radius, radius, self.size[1]
        return radius + (self.size[1] if self.shape == "capsule" else 0.0), radius, radius

    @property
    def top(self) -> float:
        return self.at[2] + self.half[2]

    @property
    def radius(self) -> float:
        """Largest distance of a point from the z axis through the origin."""
        x, y, _ = self.half
        corner = float(np.hypot(abs(self.at[0]) + x, abs(self.at[1]) + y))
        return (
            self.size[0] + float(np.hypot(*self.at[:2]))
            if self.shape in ("cylinder", "sphere")
            else corner
        )


def box(x: float, y: float, z: float, at: Vector, colour: Vector) -> Part:
    return Part("box", (x, y, z), at, colour)


def disc(radius: float, low: float, high: float, colour: Vector, x: float = 0.0) -> Part:
    """An upright cylinder between two heights."""
    return Part("cylinder", (radius, (high - low) / 2), (x, 0.0, (low + high) / 2), colour)


def ball(radius: float, z: float, colour: Vector, x: float = 0.0) -> Part:
    return Part("sphere", (radius,), (x, 0.0, z), colour)


def rod(
    radius: float, half_length: float, colour: Vector, x: float = 0.0, y: float = 0.0
) -> tuple[Part, ...]:
    """A capsule that lies on a small foot, so that it does not roll."""
    return (
        Part("capsule", (radius, half_length), (x, y, radius + 0.001), colour),
        box(half_length, 0.6 * radius, 0.15 * radius, (x, y, 0.15 * radius), colour),
    )


def standing_ball(radius: float, colour: Vector) -> tuple[Part, ...]:
    """A ball with a flat foot, so that it does not roll."""
    return ball(radius, radius + 0.001, colour), disc(0.6 * radius, 0.0, 0.2 * radius, colour)


@dataclass(frozen=True)
class Thing:
    """A graspable object. The fingers close around its origin, ``grip`` above the table."""

    name: str
    parts: tuple[Part, ...]
    grip: float = 0.02

    @property
    def radius(self) -> float:
        return max(part.radius for part in self.parts)

    @property
    def reach(self) -> float:
        """Largest distance of a point from the origin, metres."""
        top = max(part.top for part in self.parts)
        return float(np.hypot(self.radius, max(self.grip, top - self.grip)))


@dataclass(frozen=True)
class Receptacle:
    """What objects are put on; it does not move.

    ``surface`` is the height (m) on which an object rests, ``radius`` the distance (m) from the
    centre within which that surface lies.
    """

    name: str
    parts: tuple[Part, ...]
    surface: float
    radius: float = 0.05

    @property
    def outer(self) -> float:
        return max(part.radius for part in self.parts)


def rim(half_x: float, half_y: float, low: float, high: float, colour: Vector) -> tuple[Part, ...]:
    """Four walls, 6 mm thick, around a rectangle of these half sizes."""
    z = (low + high) / 2
    half = (high - low) / 2
    along_x = tuple(
        box(half_x + 0.006, 0.003, half, (0.0, side * (half_y + 0.003), z), colour)
        for side in (-1, 1)
    )
    along_y = tuple(
        box(0.003, half_y, half, (side * (half_x + 0.003), 0.0, z), colour) for side in (-1, 1)
    )
    return along_x + along_y


def ring(radius: float, high: float, colour: Vector, posts: int = 24) -> tuple[Part, ...]:
    """A round wall of cylinders."""
    angles = np.arange(posts) * 2 * np.pi / posts
    return tuple(
        Part(
            "cylinder",
            (0.007, high / 2),
            (float(radius * np.cos(a)), float(radius * np.sin(a)), high / 2),
            colour,
        )
        for a in angles
    )


def stripes(
    colours: tuple[Vector, ...], half_x: float, half_y: float, high: float
) -> tuple[Part, ...]:
    """Boxes side by side along x, of these colours."""
    half_width = half_x / len(colours)
    places = [half_width * (2 * i + 1 - len(colours)) for i in range(len(colours))]
    return tuple(
        box(half_width, half_y, high / 2, (x, 0.0, high / 2), colour)
        for x, colour in zip(places, colours, strict=True)
    )


OBJECTS = (
    Thing(
        "carrot",
        (*rod(0.014, 0.01, ORANGE), box(0.005, 0.006, 0.006, (-0.027, 0.0, 0.014), GREEN)),
        0.015,
    ),
    Thing("red cube", (box(0.02, 0.02, 0.02, (0.0, 0.0, 0.02), RED),)),
    Thing("green cylinder", (disc(0.02, 0.0, 0.045, GREEN),)),
    Thing(
        "banana",
        (
            *rod(0.012, 0.012, YELLOW),
            *rod(0.01, 0.003, YELLOW, -0.014, 0.007),
            *rod(0.01, 0.003, YELLOW, 0.014, 0.007),
        ),
        0.014,
    ),
    Thing("blue cup", (disc(0.021, 0.0, 0.045, BLUE), disc(0.017, 0.045, 0.046, BLACK)), 0.024),
    Thing("tomato", (*standing_ball(0.022, RED), disc(0.008, 0.042, 0.047, GREEN))),
    Thing(
        "eggplant",
        (*rod(0.016, 0.008, PURPLE), box(0.005, 0.008, 0.008, (0.024, 0.0, 0.016), GREEN)),
        0.016,
    ),
    Thing("mushroom", (disc(0.013, 0.0, 0.026, WHITE), disc(0.024, 0.026, 0.042, BROWN)), 0.03),
    Thing("bread", (box(0.025, 0.017, 0.015, (0.0, 0.0, 0.015), TAN),), 0.016),
    Thing("soda can", (disc(0.018, 0.0, 0.045, RED), disc(0.018, 0.045, 0.054, SILVER)), 0.028),
    Thing(
        "pink cross",
        (
            box(0.025, 0.01, 0.015, (0.0, 0.0, 0.015), PINK),
            box(0.01, 0.025, 0.015, (0.0, 0.0, 0.015), PINK),
        ),
        0.016,
    ),
    Thing(
        "die",
        (
            box(0.018, 0.018, 0.015, (0.0, 0.0, 0.015), BLACK),
            box(0.018, 0.018, 0.003, (0.0, 0.0, 0.033), WHITE),
        ),
    ),
    Thing(
        "toy house",
        (
            box(0.019, 0.019, 0.014, (0.0, 0.0, 0.014), WHITE),
            box(0.013, 0.019, 0.008, (0.0, 0.0, 0.036), RED),
        ),
    ),
    Thing(
        "traffic cone",
        (
            disc(0.024, 0.0, 0.008, ORANGE),
            disc(0.016, 0.008, 0.028, WHITE),
            disc(0.01, 0.028, 0.048, ORANGE),
        ),
        0.022,
    ),
    Thing(
        "cyan pyramid",
        tuple(
            box(w, w, 0.007, (0.0, 0.0, z), CYAN)
            for w, z in ((0.022, 0.007), (0.016, 0.021), (0.01, 0.035))
        ),
        0.017,
    ),
    Thing(
        "chess pawn",
        (disc(0.02, 0.0, 0.01, BLACK), disc(0.011, 0.01, 0.032, BLACK), ball(0.014, 0.042, BLACK)),
        0.022,
    ),
    # Training never shows the objects from here on.
    Thing("lime", standing_ball(0.02, LIME)),
    Thing("purple cube", (box(0.019, 0.019, 0.019, (0.0, 0.0, 0.019), PURPLE),)),
    Thing("yellow cylinder", (disc(0.019, 0.0, 0.045, YELLOW),), 0.022),
    Thing("red pepper", (disc(0.02, 0.0, 0.034, RED), disc(0.006, 0.034, 0.044, GREEN))),
    Thing(
        "battery",
        (
            disc(0.016, 0.0, 0.034, BLACK),
            disc(0.016, 0.034, 0.046, ORANGE),
            disc(0.006, 0.046, 0.05, SILVER),
        ),
        0.026,
    ),
    Thing(
        "white cross",
        (
            box(0.024, 0.01, 0.015, (0.0, 0.0, 0.015), WHITE),
            box(0.01, 0.024, 0.015, (0.0, 0.0, 0.015), WHITE),
        ),
        0.016,
    ),
    Thing(
        "gift box",
        (
            box(0.02, 0.02, 0.018, (0.0, 0.0, 0.018), BLUE),
            box(0.021, 0.006, 0.019, (0.0, 0.0, 0.019), YELLOW),
        ),
    ),
    Thing(
        "snowman",
        (*standing_ball(0.02, WHITE), ball(0.013, 0.045, WHITE), disc(0.01, 0.055, 0.062, BLACK)),
        0.022,
    ),
    Thing(
        "rubber duck",
        (
            *standing_ball(0.019, YELLOW),
            ball(0.012, 0.042, YELLOW),
            box(0.006, 0.005, 0.003, (0.015, 0.0, 0.042), ORANGE),
        ),
    ),
)
SEEN_OBJECTS = 16
"""The first ones are those of training, as in the papers: 16 of 25."""

RECEPTACLES = (
    Receptacle("plate", (disc(0.06, 0.0, 0.01, WHITE),), 0.01, 0.06),
    # Training never shows the receptacles from here on.
    Receptacle("blue bowl", (disc(0.055, 0.0, 0.006, BLUE), *ring(0.055, 0.016, BLUE)), 0.006),
    Receptacle(
        "wooden tray",
        (box(0.05, 0.05, 0.003, (0.0, 0.0, 0.003), TAN), *rim(0.05, 0.05, 0.0, 0.012, BROWN)),
        0.006,
    ),
    Receptacle("red towel", (box(0.06, 0.06, 0.002, (0.0, 0.0, 0.002), RED),), 0.004, 0.06),
    Receptacle(
        "pan",
        (
            disc(0.055, 0.0, 0.006, BLACK),
            *ring(0.055, 0.012, BLACK),
            box(0.01, 0.007, 0.004, (-0.07, 0.0, 0.008), BROWN),
        ),
        0.006,
    ),
    Receptacle("cutting board", (box(0.06, 0.045, 0.006, (0.0, 0.0, 0.006), TAN),), 0.012, 0.045),
    Receptacle("green mat", (disc(0.06, 0.0, 0.003, GREEN),), 0.003, 0.06),
    Receptacle("silver coaster", (disc(0.048, 0.0, 0.006, SILVER),), 0.006, 0.048),
    Receptacle(
        "blue book",
        (
            box(0.05, 0.06, 0.005, (0.0, 0.0, 0.005), WHITE),
            box(0.053, 0.062, 0.002, (0.0, 0.0, 0.012), BLUE),
        ),
        0.014,
        0.053,
    ),
    Receptacle(
        "yellow basket", (disc(0.055, 0.0, 0.006, ORANGE), *ring(0.055, 0.016, YELLOW)), 0.006
    ),
    Receptacle("pink napkin", (box(0.05, 0.05, 0.0015, (0.0, 0.0, 0.0015), PINK),), 0.003),
    Receptacle(
        "box lid",
        (box(0.05, 0.06, 0.002, (0.0, 0.0, 0.002), BROWN), *rim(0.05, 0.06, 0.0, 0.012, BROWN)),
        0.004,
    ),
    Receptacle(
        "striped towel", stripes((RED, WHITE, RED, WHITE, RED), 0.06, 0.06, 0.004), 0.004, 0.06
    ),
    Receptacle(
        "purple cushion",
        (box(0.055, 0.055, 0.006, (0.0, 0.0, 0.006), PURPLE), disc(0.05, 0.012, 0.016, PURPLE)),
        0.016,
    ),
    Receptacle("stone slab", (box(0.05, 0.06, 0.005, (0.0, 0.0, 0.005), GREY),), 0.01),
    Receptacle(
        "target",
        (
            disc(0.06, 0.0, 0.004, RED),
            disc(0.04, 0.004, 0.005, WHITE),
            disc(0.02, 0.005, 0.006, RED),
        ),
        0.006,
        0.06,
    ),
    Receptacle("flag", stripes((GREEN, WHITE, ORANGE), 0.06, 0.05, 0.004), 0.004),
)
SEEN_RECEPTACLES = 1
