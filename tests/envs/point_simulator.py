"""A point that moves to a goal: a numpy simulator that starts at once, and fails on request."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.config.errors import UserError
from rlinf_vla.envs.serving import Seen, Step, serve
from rlinf_vla.envs.shared_arrays import SimulatorSpec


class PointSimulator:
    """Actions over 50 hang the process, those over 100 kill it, those under -100 raise.

    ``options["lives"]``: a file with a number for each process: the control steps after which it dies; processes that find
    none there live on. ``no_start_from``, ``no_advice_from``: the seed whose reset or expert raises.
    """

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        if options.get("unusable"):
            raise UserError("this machine lacks a pencil: sharpen one")
        if options.get("dies_at_start"):
            print("no ink left", file=sys.stderr)
            os._exit(7)
        self._left = self._life(Path(options["lives"])) if "lives" in options else None
        self._no_start = options.get("no_start_from")
        self._no_advice = options.get("no_advice_from")
        self.seed: list[int | None] = [None] * slots
        self.spec = SimulatorSpec(
            action_dim=2, state_dim=2, control_hz=10.0, images={"map": [8, 6]}, picture=[4, 4]
        )
        self.position = np.zeros((slots, 2), np.float32)
        self.goal = np.zeros((slots, 2), np.float32)

    def _life(self, file: Path) -> int | None:
        lives = file.read_text().split()
        file.write_text(" ".join(lives[1:]))
        return int(lives[0]) if lives else None

    def reset(self, slot: int, seed: int, task: int) -> str:
        if seed == self._no_start:
            raise FileNotFoundError("no drawing")
        self.seed[slot] = seed
        self.position[slot], self.goal[slot] = np.random.RandomState(seed).uniform(-1, 1, (2, 2))
        return f"task {task}"

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        if self._left == 0:
            os._exit(7)
        self._left = None if self._left is None else self._left - 1
        if action[0] > 100:
            print("out of ink", file=sys.stderr)
            os._exit(7)
        if action[0] > 50:
            time.sleep(100)
        if action[0] < -100:
            raise ZeroDivisionError("paper torn")
        self.position[slot] += np.clip(action, -1, 1) * np.float32(0.3)
        reached = bool(np.abs(self.position[slot] - self.goal[slot]).max() < 0.01)
        return Step(float(reached), reached, reached)

    def observe(self, slot: int) -> Seen:
        image = np.zeros((8, 6, 3), np.uint8)
        image[..., :2] = np.abs(self.position[slot]) * 100
        return Seen(self.position[slot], {"map": image})

    def expert(self, slot: int) -> NDArray[np.float32]:
        if self.seed[slot] in (None, self._no_advice):
            raise ValueError("no line leads there")
        return np.clip((self.goal[slot] - self.position[slot]) / np.float32(0.3), -1, 1)

    def render(self, slot: int) -> NDArray[np.uint8]:
        return np.full((4, 4, 3), 100 * np.abs(self.position[slot, 0]), np.uint8)


if __name__ == "__main__":
    serve(PointSimulator)
