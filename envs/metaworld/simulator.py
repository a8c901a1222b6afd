"""Simulator process of Meta-World.

Needs numpy and metaworld only: it may run in a Python environment without the trainer's packages.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..serving import PICTURE_SIZE, Seen, Step, serve
from .config import CAMERAS, STATES
from .conventions import to_common, to_world, tool_state
from .outline import outline
from .world import World


class MetaWorldSimulator:
    """Implements ``serving.Simulator``.

    options: those of ``plugin.simulator_options``, and ``renderer``.
    """

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        self._options = options
        self._tasks = list(options["tasks"])
        self._common = options["convention"] == "common"
        self._worlds: list[World | None] = [None] * slots
        self._idle: OrderedDict[str, list[World]] = OrderedDict()
        """Task -> worlds that no slot uses, least recently used first."""
        self._value = [0.0] * slots
        """Progress of each slot's episode, 0 to 1."""
        stack = {name: version(name) for name in ("metaworld", "mujoco", "gymnasium", "numpy")}
        stack |= {
            name: str(options[name])
            for name in ("renderer", "rendering", "convention", "state", "action_repeat")
        }
        self.spec = replace(outline(options), stack=stack)

    def reset(self, slot: int, seed: int, task: int) -> str:
        name = self._tasks[task]
        last = self._worlds[slot]
        self._worlds[slot] = None
        if last is not None and last.task == name:
            world = last
        else:
            if last is not None:
                self._idle.setdefault(last.task, []).append(last)
                self._idle.move_to_end(last.task)
            world = self._world(name)
        world.begin(seed)
        self._worlds[slot] = world
        self._value[slot] = 0.0
        return str(self._options["tasks"][name])

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        world = self.under_way(slot)
        total = 0.0
        success = False
        command = np.clip(to_world(action) if self._common else action, -1, 1)
        for _ in range(self._options["action_repeat"]):
            dense, success = world.step(command)
            total += dense
            if success:
                break
        return Step(self._reward(slot, dense, total, success), success, success)

    def observe(self, slot: int) -> Seen:
        world = self.under_way(slot)
        size = self._options["image_size"]
        images = {
            name: world.image(camera, size) for name, camera in self._options["cameras"].items()
        }
        if self._options["state"] == "tool":
            state = tool_state(*world.tool())
        else:
            state = world.observation[: STATES[self._options["state"]]]
        return Seen(state.astype(np.float32), images)

    def expert(self, slot: int) -> NDArray[np.float32]:
        action = self.under_way(slot).expert()
        return (to_common(action) if self._common else action).astype(np.float32)

    def render(self, slot: int) -> NDArray[np.uint8]:
        return self.under_way(slot).image(CAMERAS["base"], PICTURE_SIZE, exact=True)

    def under_way(self, slot: int) -> World:
        world = self._worlds[slot]
        assert world is not None
        return world

    def _reward(self, slot: int, dense: float, total: float, success: bool) -> float:
        """Reward of a control step.

        ``dense``: Meta-World's of its last step; ``total``: the sum over its steps.
        """
        kind = self._options["reward"]
        if kind == "dense":
            return total
        if kind == "sparse":
            return float(success)
        before = self._value[slot]
        self._value[slot] = 1.0 if success else dense / 10
        return self._value[slot] - before

    def _world(self, task: str) -> World:
        """Return a world that no slot uses; close idle ones beyond ``scenes`` tasks."""
        worlds = self._idle.get(task)
        world = worlds.pop() if worlds else None
        if worlds == []:
            del self._idle[task]
        while len(self._idle) > self._options["scenes"]:
            for old in self._idle.popitem(last=False)[1]:
                old.close()
        return world or World(task, self._options["rendering"] == "fast")


if __name__ == "__main__":
    # EGL would number only these devices; mujoco_gl.Renderer counts all
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    serve(MetaWorldSimulator)
