"""A level that actions raise or lower, shown in a small image: a numpy simulator for child processes that starts at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.envs.serving import Seen, Step, serve
from rlinf_vla.envs.shared_arrays import SimulatorSpec

GOAL = 3


class CountingSimulator:
    """``options``: ``seconds`` that a control step takes."""

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        self.spec = SimulatorSpec(
            action_dim=4, state_dim=2, control_hz=10.0, images={"base": [64, 64]}, picture=[64, 64]
        )
        self._seconds = options.get("seconds", 0.0)
        self._level = np.zeros(slots, np.int64)

    def reset(self, slot: int, seed: int, task: int) -> str:
        self._level[slot] = seed % 3 - 1
        return "push the cube"

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        time.sleep(self._seconds)
        if abs(action[0]) >= 0.7:
            self._level[slot] += 1 if action[0] > 0 else -1
        reached = bool(self._level[slot] >= GOAL)
        return Step(float(reached) + 0.1 * float(action[1]), reached, reached)

    def observe(self, slot: int) -> Seen:
        return Seen(np.array([self._level[slot], 0], np.float32), {"base": self.render(slot)})

    def expert(self, slot: int) -> NDArray[np.float32]:
        return np.array([1, 0, 0, 0], np.float32)

    def render(self, slot: int) -> NDArray[np.uint8]:
        image = np.zeros((64, 64, 3), np.uint8)
        image[:, : 32 + 8 * int(np.clip(self._level[slot], -3, 3)), 0] = 255
        return image


if __name__ == "__main__":
    serve(CountingSimulator)
