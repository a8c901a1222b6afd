"""Plays perturbed episodes of one task in one process with OpenGL. Prints one JSON object."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import redirect_stdout
from typing import Any

import numpy as np

from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.perturbations import DIMENSIONS
from rlinf_vla.envs.libero.plugin import files_of, simulator_options
from rlinf_vla.envs.libero.simulator import LiberoSimulator
from rlinf_vla.envs.libero.suites import selected_tasks

BASE, SEED, STEPS = "libero_spatial", 3, 2
NAMES = (BASE, *(f"{BASE}_plus_{dimension}{severity}" for dimension in DIMENSIONS for severity in ("", "_2", "_4")))
OPTIONS: dict[str, Any] = {
    "suites": list(NAMES),
    "tasks": [0],
    "cameras": ["base", "wrist"],
    "image_size": 64,
    "rendering": "fast",
    "wait_steps": 0,
}
WAIT = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
ACTIONS = np.random.RandomState(0).uniform(-1, 1, (STEPS, 7)).astype(np.float32)


def digest(images: dict[str, Any], state: Any) -> str:
    """Of a policy's observation: all its bits."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in (*images.values(), state))).hexdigest()


class Played:
    """What is seen of an episode's first steps."""

    def __init__(self, simulator: LiberoSimulator, name: str, seed: int = SEED, slot: int = 0) -> None:
        self.instruction = simulator.reset(slot, seed, NAMES.index(name))
        self.seen, self.qpos, self.digests = [], [], []
        self.watch(simulator, slot)
        for action in ACTIONS:
            simulator.step(slot, action)
            self.watch(simulator, slot)

    def watch(self, simulator: LiberoSimulator, slot: int) -> None:
        seen = simulator.observe(slot)
        self.seen.append(seen)
        self.qpos.append(simulator.under_way(slot)[1].data.qpos.copy())
        self.digests.append(digest(seen.images, seen.state))

    def image(self, camera: str) -> Any:
        return self.seen[0].images[camera].astype(float)


def changes(found: Played, plain: Played, arm: list[int], places: list[int]) -> dict[str, Any]:
    """What differs from the episode without perturbation, and by how much."""
    moved = found.qpos[0] - plain.qpos[0]
    others = np.delete(moved, arm + places)
    return {
        "instruction": found.instruction != plain.instruction,
        "base": float(np.abs(found.image("base") - plain.image("base")).mean()),
        "wrist": float(np.abs(found.image("wrist") - plain.image("wrist")).mean()),
        "trajectory": not all(np.array_equal(a, b) for a, b in zip(found.qpos, plain.qpos, strict=True)),
        "arm": float(np.linalg.norm(moved[arm])),
        "objects": float(np.abs(moved[places]).max()),
        "rest": float(np.abs(others).max()),
    }


def interleaved(simulator: LiberoSimulator) -> bool:
    """Episodes that take turns in one scene show what each shows alone."""
    names = [BASE, *(f"{BASE}_plus_{dimension}_4" for dimension in ("camera", "light", "background", "initial_state"))]
    alone = [Played(simulator, name).digests for name in names]
    for slot, name in enumerate(names):
        simulator.reset(slot, SEED, NAMES.index(name))
    turns = [[digest((seen := simulator.observe(slot)).images, seen.state)] for slot in range(len(names))]
    for action in ACTIONS:
        for slot in range(len(names)):
            simulator.step(slot, action)
        for slot, turn in enumerate(turns):
            turn.append(digest((seen := simulator.observe(slot)).images, seen.state))
    return turns == alone


def drift(simulator: LiberoSimulator, seed: int, places: list[int]) -> float:
    """How far a displaced object slides (m) while the arm waits and objects fall to the table."""
    simulator.reset(0, seed, NAMES.index(f"{BASE}_plus_layout_4"))
    qpos = simulator.under_way(0)[1].data.qpos
    before = qpos[places].copy()
    for _ in range(12):
        simulator.step(0, WAIT)
    return float(np.abs(qpos[places] - before).max())


def main() -> None:
    config = LiberoConfig(**OPTIONS)
    options = {**simulator_options(config), "tasks": [files_of(task) for task in selected_tasks(config)], "renderer": ""}
    simulator = LiberoSimulator(options, slots=5)
    plain = Played(simulator, BASE)
    env = simulator.under_way(0)[0].env
    arm = [int(joint) for joint in env.robots[0]._ref_joint_pos_indexes]
    starts = [env.sim.model.get_joint_qpos_addr(thing.joints[-1])[0] for thing in env.objects_dict.values()]
    places = [int(start + axis) for start in starts for axis in (0, 1)]
    played = {name: Played(simulator, name) for name in NAMES}
    other = {name: Played(simulator, name, SEED + 50) for name in NAMES}
    again = {name: Played(simulator, name).digests for name in NAMES}
    print(
        json.dumps(
            {
                "changes": {name: changes(each, plain, arm, places) for name, each in played.items()},
                "instructions": {name: each.instruction for name, each in played.items()},
                "digests": {name: each.digests[:1] for name, each in played.items()},
                "again": {name: again[name] == each.digests for name, each in played.items()},
                "another seed": {name: other[name].digests != each.digests for name, each in played.items()},
                "instructions of another seed": {name: each.instruction for name, each in other.items()},
                "interleaved": interleaved(simulator),
                "drifts": [drift(simulator, seed, places) for seed in (2, 4, 5)],
                "listed": simulator.spec.instructions,
            }
        ),
        file=sys.__stdout__,
    )


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        main()
