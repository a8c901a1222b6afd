"""Measured inside one process with Genesis, on a scene file that uses everything. Prints one JSON object.

python genesis_facts.py CACHE_FOLDER SCENE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.envs.genesis import predicates
from rlinf_vla.envs.genesis.config import GenesisConfig
from rlinf_vla.envs.genesis.kernels import environment
from rlinf_vla.envs.genesis.plugin import simulator_options
from rlinf_vla.envs.genesis.simulator import GenesisBatch

NUM_ENVS = 4
ROWS = list(range(NUM_ENVS))


def batch(path: str, visuals: str) -> GenesisBatch:
    _, options = simulator_options(
        GenesisConfig(
            scene=path, robot_visuals=visuals, image_size=48, control_mode="ee_delta_pose"
        )
    )
    return GenesisBatch(options, NUM_ENVS, "cpu")


def played(env: GenesisBatch, actions: list[Tensor]) -> list[str]:
    """What one can know of the states, bit for bit: after a reset and each action."""
    env.reset([7, 8, 9, 10], ROWS)
    found = [env.now]
    for action in actions:
        env.step(action)
        found.append(env.now)
    names = (
        "joints",
        "tool",
        "tool_quaternion",
        "finger_speed",
        "centre",
        "quaternion",
        "up",
        "speed",
    )
    return [
        "".join(getattr(state, name).numpy().tobytes().hex() for name in names) for state in found
    ]


def standing(env: GenesisBatch) -> dict[str, Any]:
    """After half a second of nothing: how far each object and the tool have moved (m), and which predicates hold."""
    env.reset([1, 2, 3, 4], ROWS)
    before = env.now
    still = torch.zeros(NUM_ENVS, 7)
    still[:, -1] = 1
    for _ in range(10):
        env.step(still)
    scene, state = env.scene, env.now
    moved = (env.now.centre - before.centre).norm(dim=-1).amax(0).tolist()
    return {
        "moved": dict(zip(scene.things, moved, strict=True)),
        "tool_moved": float((env.now.tool - before.tool).norm(dim=-1).max()),
        "low": dict(
            zip(scene.things, (state.centre[..., 2] - state.rise).amin(0).tolist(), strict=True)
        ),
        "holds": [predicates.holds(state, predicate).tolist() for predicate in scene.success],
    }


def expert(env: GenesisBatch, steps: int = 60) -> tuple[list[bool], list[str], list[Tensor]]:
    """Which episodes it solves, what they were told, and its actions."""
    told = env.reset([1, 2, 3, 4], ROWS)
    actions = []
    solved = torch.zeros(NUM_ENVS, dtype=torch.bool)
    for _ in range(steps):
        actions.append(env.expert())
        solved |= env.step(actions[-1])[2]
    return solved.tolist(), told, actions


def main(path: str) -> dict[str, Any]:
    env = batch(path, "low_poly")
    solved, told, actions = expert(env)
    _, images = env.observe([0, 1])
    generator = torch.Generator().manual_seed(0)
    some = [2 * torch.rand(NUM_ENVS, 7, generator=generator) - 1 for _ in range(8)]
    found = {
        "standing": standing(env),
        "solved": solved,
        "told": told,
        "images": {
            name: [list(image.shape), float(image.float().std())] for name, image in images.items()
        },
    }
    low_poly = played(env, [*some, *actions[:30]])
    looks = env.observe([0])[1]["base"]
    env.close()
    stock = batch(path, "stock")
    found["low_poly_is_the_same_physics"] = low_poly == played(stock, [*some, *actions[:30]])
    found["looks_differ"] = not torch.equal(stock.observe([0])[1]["base"], looks)
    stock.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(environment(Path(sys.argv[1])))
    facts = main(sys.argv[2])
    import genesis

    genesis.destroy()  # which keeps what it compiled
    print(json.dumps(facts))
