"""What ManiSkill's tasks draw for several environments at once, beside what each one draws alone.

Prints one JSON object; run by test_maniskill_facts.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import gymnasium
import mani_skill.envs  # noqa: F401
import numpy as np
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.envs.utils import randomization
from mani_skill.utils.structs import Actor, Articulation
from torch import Tensor

from rlinf_vla.envs.maniskill.row_draws import NotByRow, rows_drawn

TASKS = ("PushCube-v1", "PickCube-v1", "StackCube-v1", "PlaceSphere-v1", "LiftPegUpright-v1")
ROWS = 4
DRAWS = 60
Draw = Callable[[int, Any], Any]


def drawn(rows: int, numbers: Any) -> Tensor:
    """What a task may draw, ``[rows, D]``; the sampler rejects often."""
    with torch.device("cpu"):
        first = torch.rand((rows, 3))
        sampler = randomization.UniformPlacementSampler([[0.0, 0.0], [1.0, 1.0]], rows)
        places = [sampler.sample(0.25, 100) for _ in range(3)]
        turn = randomization.random_quaternions(rows, lock_x=True, lock_y=True)
        kinds = torch.randint(0, 9, (rows, 2)).float()
        other = torch.randint(7, size=(rows, 1)).float()
        heights = torch.randn(rows, 20)
        plain = torch.rand(rows)[:, None]
    joints = torch.from_numpy(numbers.normal(0, 0.02, (rows, 9)))
    noise = torch.from_numpy(numbers.uniform(-1, 1, size=(rows, 2)))
    return torch.cat([first, *places, turn, kinds, other, heights, plain, joints, noise], dim=1)


def together(seeds: list[int], draw: Draw) -> Any:
    with rows_drawn(seeds, [np.random.RandomState(seed) for seed in seeds]) as numbers:
        return draw(len(seeds), numbers)


def alone(seed: int, draw: Draw) -> Any:
    """As ManiSkill draws for a batch of one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return draw(1, np.random.RandomState(seed))


def rows_draw_as_alone() -> bool:
    same = []
    for first in range(0, DRAWS, ROWS):
        seeds = list(range(first, first + 1 + first // ROWS % ROWS))
        found = together(seeds, drawn)
        same += [
            torch.equal(row, alone(seed, drawn)[0]) for row, seed in zip(found, seeds, strict=True)
        ]
    return all(same)


def refused(draw: Draw) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            together([1, 2, 3], draw)
    except NotByRow:
        return True
    return False


WITHOUT_ROWS: dict[str, Draw] = {
    "another number of rows": lambda rows, numbers: torch.rand(rows + 1),
    "one number": lambda rows, numbers: torch.rand(()),
    "an order": lambda rows, numbers: torch.randperm(rows),
    "in place": lambda rows, numbers: torch.zeros(rows).uniform_(),
    "a number for all": lambda rows, numbers: numbers.normal(0, 1, rows),
    "a choice": lambda rows, numbers: numbers.choice(3),
}


def placed(env: Any, rows: int, numbers: Any) -> list[Tensor]:
    """What a task's ``_initialize_episode`` places; scenes of the CPU have room for one row."""
    found: list[Tensor] = []

    def note(_: Any, value: Any = None) -> None:
        raw = getattr(value, "raw_pose", value)
        if isinstance(raw, (Tensor, np.ndarray)):
            found.append(torch.as_tensor(raw).double().clone())

    env._episode_rng = numbers
    with (
        patch.object(Actor, "set_pose", note),
        patch.object(Articulation, "set_pose", note),
        patch.object(BaseAgent, "reset", note),
    ):
        env._initialize_episode(torch.arange(rows), {})
    return found


def task_places_as_alone(task: str) -> bool:
    env = gymnasium.make(task, obs_mode="none", render_backend="none").unwrapped
    seeds = list(range(40, 40 + ROWS))

    def draw(rows: int, numbers: Any) -> list[Tensor]:
        return placed(env, rows, numbers)

    whole = together(seeds, draw)
    same = [any(len(value) == ROWS for value in whole)]
    for row, seed in enumerate(seeds):
        for one, value in zip(alone(seed, draw), whole, strict=True):
            same.append(torch.equal(value[row if len(value) == ROWS else 0], one[0]))
    env.close()
    return all(same)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable()
    print(
        json.dumps(
            {
                "rows": rows_draw_as_alone(),
                "refused": {name: refused(draw) for name, draw in WITHOUT_ROWS.items()},
                "tasks": {task: task_places_as_alone(task) for task in TASKS},
            }
        )
    )
