"""What belongs to one episode under way in a scene."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTROL_HZ = 20
TIMESTEP = 0.002
PERIOD = 1.0 / CONTROL_HZ


class SamplingClock:
    """When robosuite samples its observables: once per control step, but not at its end.

    The same floating-point arithmetic as ``robosuite.utils.observables.Observable``, which
    published results depend on: a reset forces two samples, after which it samples at the second
    last of the 25 substeps.
    """

    def __init__(self) -> None:
        self._time = 0.0
        self._looked = False
        for _ in range(2):  # robosuite's reset, then LIBERO's initial state
            self._time += TIMESTEP
        self._looked = True

    def tick(self) -> bool:
        """Advance by one substep. Returns whether to sample now."""
        self._time += TIMESTEP
        look = not self._looked and self._time <= PERIOD
        self._looked |= look
        if self._time >= PERIOD:
            look |= not self._looked
            self._time %= PERIOD
            self._looked = False
        return look


@dataclass
class Episode:
    """One episode under way in a scene."""

    data: Any
    """MjData of the present."""
    seen: Any
    """MjData when robosuite last sampled."""
    clock: SamplingClock = field(default_factory=SamplingClock)
    robot: dict[str, Any] = field(default_factory=dict)
    """Attributes of robosuite's robot, including its controller."""
    grip: Any = None
    """State of the gripper's integrator."""
    sites: Any = None
    """Present colours of the model's sites; the flame of a stove is one."""
    seen_sites: Any = None
    images: dict[str, NDArray[np.uint8]] | None = None
    """Images of the last sample, if every control step renders."""
    look: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What a perturbation changes in the model that the images show: field -> its values."""
    textures: dict[int, int] = field(default_factory=dict)
    """What a perturbation changes in the background: texture -> file."""
    steps: int = 0
    """Control steps executed, those of waiting included."""
