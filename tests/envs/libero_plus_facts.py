"""Plays perturbed episodes of one task in one process with OpenGL. Prints one JSON object."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import redirect_stdout
from typing import Any

import numpy as np

from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.conventions import STORED
from rlinf_vla.envs.libero.distractors import HIDDEN_GROUP, PREFIX
from rlinf_vla.envs.libero.perturbations import DIMENSIONS
from rlinf_vla.envs.libero.plugin import files_of, simulator_options
from rlinf_vla.envs.libero.simulator import LiberoSimulator
from rlinf_vla.envs.libero.suites import selected_tasks

BASE = "libero_spatial"
SEED = 3
STEPS = 2
DRAWN = EVALUATION_SEEDS.stop + SEED
NAMES = (
    BASE,
    *(
        f"{BASE}_plus_{dimension}{severity}"
        for dimension in DIMENSIONS
        for severity in ("", "_2", "_4")
    ),
)
OPTIONS: dict[str, Any] = {
    "suites": list(NAMES),
    "tasks": [0],
    "cameras": ["base", "wrist"],
    "image_size": 64,
    "rendering": "fast",
    "wait_steps": 0,
    "wait_gripper": "open",
}
WAIT = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
ACTIONS = np.random.RandomState(0).uniform(-1, 1, (STEPS, 7)).astype(np.float32)


def digest(images: dict[str, Any], state: Any) -> str:
    """Of a policy's observation: all its bits."""
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(each).tobytes() for each in (*images.values(), state))
    ).hexdigest()


def positions(env: Any, name: str) -> Any:
    """The places of an object's joint in the state's positions."""
    return np.arange(*env.sim.model.get_joint_qpos_addr(env.objects_dict[name].joints[-1]))


class Played:
    """What is seen of an episode's first steps."""

    def __init__(
        self, simulator: LiberoSimulator, name: str, seed: int = SEED, slot: int = 0
    ) -> None:
        self.instruction = simulator.reset(slot, seed, NAMES.index(name))
        self.seen = []
        self.qpos = []
        self.digests = []
        self.watch(simulator, slot)
        for action in ACTIONS:
            simulator.step(slot, action)
            self.watch(simulator, slot)

    def watch(self, simulator: LiberoSimulator, slot: int) -> None:
        seen = simulator.observe(slot)
        self.seen.append(seen)
        scene, episode = simulator.under_way(slot)
        added = [
            positions(scene.env, name) for name in scene.env.objects_dict if name.startswith(PREFIX)
        ]
        self.qpos.append(np.delete(episode.data.qpos, np.concatenate([np.zeros(0, int), *added])))
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
        "trajectory": not all(
            np.array_equal(a, b) for a, b in zip(found.qpos, plain.qpos, strict=True)
        ),
        "largest": max(
            float(np.abs(a - b).max()) for a, b in zip(found.qpos, plain.qpos, strict=True)
        ),
        "arm": float(np.linalg.norm(moved[arm])),
        "objects": float(np.abs(moved[places]).max()),
        "rest": float(np.abs(others).max()),
    }


def interleaved(simulator: LiberoSimulator) -> bool:
    """Episodes that take turns in one scene show what each shows alone."""
    names = [
        BASE,
        *(
            f"{BASE}_plus_{dimension}_4"
            for dimension in ("camera", "light", "background", "initial_state", "distractors")
        ),
    ]
    alone = [Played(simulator, name).digests for name in names]
    for slot, name in enumerate(names):
        simulator.reset(slot, SEED, NAMES.index(name))
    turns = [
        [digest((seen := simulator.observe(slot)).images, seen.state)] for slot in range(len(names))
    ]
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


def distracted(simulator: LiberoSimulator, severity: int, seed: int) -> dict[str, Any]:
    """The distractors of an episode: what is seen of them, and what they touch and change."""
    simulator.reset(0, seed, NAMES.index(f"{BASE}_plus_distractors_{severity}"))
    scene, episode = simulator.under_way(0)
    env = scene.at(episode)
    model = scene.env.sim.model._model
    data = episode.data
    everything = {
        name: positions(env, name) for name in env.objects_dict if name.startswith(PREFIX)
    }
    shown = {name: place for name, place in everything.items() if data.qpos[place[2]] > 0}
    root = model.body_rootid[model.geom_bodyid]
    geoms = {name: np.flatnonzero(root == env.obj_body_id[name]) for name in everything}
    begin = np.concatenate([data.qpos[place] for place in shown.values()])
    touching = {int(geom) for each in data.contact[: data.ncon] for geom in each.geom}
    whole = scene.images(episode)["base"].astype(int)
    pixels = []
    for name in shown:
        groups = model.geom_group.copy()
        model.geom_group[geoms[name]] = HIDDEN_GROUP
        pixels.append(int((np.abs(scene.images(episode)["base"] - whole).sum(2) > 30).sum()))
        model.geom_group[:] = groups
    for _ in range(12):
        simulator.step(0, WAIT)
    moved = np.concatenate([data.qpos[place] for place in shown.values()]) - begin
    parked = [data.qpos[place[2]] for name, place in everything.items() if name not in shown]
    goal = env.parsed_problem["goal_state"]
    (_, thing, plate), *_ = goal
    standing = bool(env._check_success())
    results = []
    for name in (
        next(iter(shown)),
        thing,
    ):  # a distractor on the plate is no success; the task's own object is
        data.qpos[positions(env, name)[:3]] = data.qpos[positions(env, plate)[:3]] + np.array(
            [0, 0, 0.03]
        )
        data.qvel[:] = 0
        for _ in range(12):
            simulator.step(0, WAIT)
        results.append(bool(env._check_success()))
        data.qpos[positions(env, name)[:3]] = [-0.1, 0.5, 1.5]
    return {
        "names": sorted(shown),
        "held": [name for name in env.objects_dict if name not in everything],
        "touch": bool(touching & {int(geom) for each in geoms.values() for geom in each}),
        "pixels": pixels,
        "moved": float(np.abs(moved.reshape(-1, 7)[:, :2]).max()),
        "parked": [float(each) for each in parked],
        "standing": standing,
        "success with a distractor in its place": results[0],
        "success": results[1],
    }


def main() -> None:
    config = LiberoConfig(**OPTIONS)
    options = {
        **simulator_options(config),
        "tasks": [files_of(task) for task in selected_tasks(config)],
        "renderer": "",
    }
    simulator = LiberoSimulator(options, slots=6)
    plain = Played(simulator, BASE)
    env = simulator.under_way(0)[0].env
    arm = [int(joint) for joint in env.robots[0]._ref_joint_pos_indexes]
    starts = [
        env.sim.model.get_joint_qpos_addr(thing.joints[-1])[0]
        for thing in env.objects_dict.values()
    ]
    places = [int(start + axis) for start in starts for axis in (0, 1)]
    played = {name: Played(simulator, name) for name in NAMES}
    # as with init_states=official: the same state again
    drawn_from = options["stored_below"]
    options["stored_below"] = None
    other = {name: Played(simulator, name, SEED + STORED) for name in NAMES}
    options["stored_below"] = drawn_from
    again = {name: Played(simulator, name).digests for name in NAMES}
    print(
        json.dumps(
            {
                "changes": {
                    name: changes(each, plain, arm, places) for name, each in played.items()
                },
                "instructions": {name: each.instruction for name, each in played.items()},
                "digests": {name: each.digests[:1] for name, each in played.items()},
                "again": {name: again[name] == each.digests for name, each in played.items()},
                "another seed": {
                    name: other[name].digests != each.digests for name, each in played.items()
                },
                "instructions of another seed": {
                    name: each.instruction for name, each in other.items()
                },
                "interleaved": interleaved(simulator),
                "drifts": [drift(simulator, seed, places) for seed in (2, 4, 5)],
                "drawn": changes(
                    Played(simulator, f"{BASE}_plus_distractors_4", DRAWN),
                    Played(simulator, BASE, DRAWN),
                    arm,
                    places,
                ),
                "distracted": {
                    f"{each}, {seed}": distracted(simulator, each, seed)
                    for each in (2, 4)
                    for seed in (SEED, DRAWN)
                },
                "listed": simulator.spec.instructions,
            }
        ),
        file=sys.__stdout__,
    )


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        main()
