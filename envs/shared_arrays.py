"""Memory that the training process shares with its simulator processes, as arrays of one spec."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.core.jpeg import round_trip
from rlinf_vla.core.observation_features import camera, picture

_ALIGNMENT = 64


@dataclass(frozen=True)
class SimulatorSpec:
    action_dim: int
    state_dim: int
    control_hz: float
    images: dict[str, list[int]]
    """name -> [height, width]."""
    picture: list[int]
    """[height, width] of the image that ``render`` returns."""
    tool: list[float] | None = None
    """[m, rad] that 1 means in an action that moves the tool; None for other kinds of action."""
    native: dict[str, Any] | None = None
    """Fields of ``Convention`` (``tool`` as above) that differ from docs/conventions.md."""
    instructions: list[str] = field(default_factory=list)
    """All instructions that ``reset`` can return; empty: not known."""
    starts: int | None = None
    """As of ``EnvSpec``."""
    stack: dict[str, str] = field(default_factory=dict)
    """Software and hardware stack: versions, physics, renderer."""


Shapes = dict[str, tuple[Any, tuple[int, ...]]]
"""name -> (numpy dtype, shape)."""


def observation_shapes(spec: SimulatorSpec, slots: int) -> Shapes:
    """Shapes of ``state``, ``images/NAME`` and ``jpeg/NAME``, for all slots."""
    images: Shapes = {
        f"{kind}/{name}": (
            np.dtype(camera(name).dtype),
            (slots, *picture(name, tuple(size))),
        )
        for kind in ("images", "jpeg")
        for name, size in spec.images.items()
    }
    return {"state": (np.float32, (slots, spec.state_dim)), **images}


def placed(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Return where in a memory each array begins, aligned, and the bytes of all."""
    offsets = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        offsets[name] = end
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


class SharedArrays:
    """Arrays that the parent and the simulators share, for ``N`` slots and ``L`` control steps.

    One row per slot, so two processes never write the same bytes. The parent writes actions float32
    ``[N, L, D]``; row ``n`` is the whole episode so far, from which a lost simulator is rebuilt.
    The simulator writes the rest: reached int64 ``[N]``, 0 before the slot's first reset in this
    process, then 1 plus the control steps that its episode has had here; reward float32,
    terminated, success and truncated bool ``[N, L]``; state float32 ``[N, S]``; images name ->
    uint8 ``[N, H, W, 3]``; expert float32 ``[N, D]``; picture uint8 ``[H, W, 3]``, one rendered
    image at a time; jpeg, the images after a JPEG round trip, of those for which the parent set
    ``as_jpeg`` (bool, in the order of ``images``).
    """

    def __init__(self, file: int, spec: SimulatorSpec, slots: int, episode_limit: int) -> None:
        """Map the open file ``file``, growing it to the size needed."""
        n = slots
        limit = episode_limit
        dim = spec.action_dim
        shapes: Shapes = {
            "actions": (np.float32, (n, limit, dim)),
            "reached": (np.int64, (n,)),
            "reward": (np.float32, (n, limit)),
            "terminated": (np.bool_, (n, limit)),
            "success": (np.bool_, (n, limit)),
            "truncated": (np.bool_, (n, limit)),
            "expert": (np.float32, (n, dim)),
            "picture": (np.uint8, (*spec.picture, 3)),
            "as_jpeg": (np.bool_, (len(spec.images),)),
            **observation_shapes(spec, n),
        }
        offsets, end = placed(shapes)
        if os.fstat(file).st_size < end:
            os.ftruncate(file, end)
        memory = mmap.mmap(file, end)
        views: dict[str, NDArray[Any]] = {
            name: np.ndarray(shape, dtype, memory, offsets[name])
            for name, (dtype, shape) in shapes.items()
        }
        self.actions: NDArray[np.float32] = views["actions"]
        self.reached: NDArray[np.int64] = views["reached"]
        self.reward: NDArray[np.float32] = views["reward"]
        self.terminated: NDArray[np.bool_] = views["terminated"]
        self.success: NDArray[np.bool_] = views["success"]
        self.truncated: NDArray[np.bool_] = views["truncated"]
        self.state: NDArray[np.float32] = views["state"]
        self.expert: NDArray[np.float32] = views["expert"]
        self.picture: NDArray[np.uint8] = views["picture"]
        self.as_jpeg: NDArray[np.bool_] = views["as_jpeg"]
        self.images: dict[str, NDArray[np.uint8]] = {
            name: views[f"images/{name}"] for name in spec.images
        }
        self.jpeg: dict[str, NDArray[np.uint8]] = {
            name: views[f"jpeg/{name}"] for name in spec.images
        }

    def record(self, at: Any, reward: Any, terminated: Any, success: Any, truncated: Any) -> None:
        """Store the outcome of control steps. ``at``: their slots and numbers."""
        self.reward[at] = reward
        self.terminated[at] = terminated
        self.success[at] = success
        self.truncated[at] = truncated

    def show(self, slot: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Store the images ``[H, W, 3]`` of a slot, and those that the parent reads as JPEG."""
        for image, through_jpeg in zip(self.images, self.as_jpeg, strict=True):
            self.images[image][slot] = images[image]
            if through_jpeg:
                self.jpeg[image][slot] = round_trip(self.images[image][slot])
