"""Play recorded episodes of PutOnPlateInScene25; ``scene25_recordings`` starts this program.

python -m studies.scene25_simulated RECORDINGS RENDER_BACKEND
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import gymnasium
import mani_skill.envs  # noqa: F401  (registers the tasks)
import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_vla.envs.maniskill import fast_paths, scene25
from rlinf_vla.envs.maniskill.scene25_episodes import PREFIX
from rlinf_vla.envs.maniskill.scene25_rules import Progress

from .scene25_recordings import Largest, counts, pixels, read

FINGERS_FREE = 0.91
"""Tool height from which no finger touches the table, metres."""
ROLLED = 0.1
"""How far an object may come to rest from where it did, metres: objects roll."""
ELSEWHERE = 0.005
"""From here on it counts as another place."""
GROWN = np.ones((5, 5), np.uint8)
"""Pixels around what is shown that may belong to it."""
Recorded = dict[str, Any]


class Played:
    """Plays recorded episodes and collects differences."""

    def __init__(self, folder: Path, render_backend: str) -> None:
        self.folder = folder
        self.render_backend = render_backend
        self.counts = counts(folder)
        self.largest = Largest()

    def begin(self, episode: Recorded, version: str = "rlinf") -> Any:
        env: Any = gymnasium.make(
            f"{PREFIX}-v1",
            num_envs=1,
            obs_mode="rgb+segmentation",
            reward_mode="normalized_dense",
            sim_backend="physx_cpu",
            render_backend=self.render_backend,
            task=episode["task"].removeprefix(PREFIX),
            obj_set=episode["obj_set"],
            version=version,
            carrot=str(self.folder / "assets" / "carrot"),
            counts=self.counts,
        ).unwrapped
        env._obs_mode = "none"
        env.reset(seed=0, options={"reconfigure": True, "episode_id": [episode["episode_id"]]})
        return env

    def episode(self, path: Path) -> None:
        """Compare an episode of ``episodes`` or ``success``."""
        recorded = read(path)
        where = path.parent.name
        rows = np.load(path.with_suffix(".npz"))
        env = self.begin(recorded)
        self.start(env, recorded)
        free = contact_free(rows)
        gentle = recorded["mode"] == "grasp" or where == "success"
        levels = [0.0]
        for step in range(len(rows["actions"]) + 1):
            if step:
                levels.append(
                    float(env.step(torch.from_numpy(rows["actions"][step - 1 : step]))[1])
                )
            self.targets(env, rows, step)
            if step < free:
                self.robot(env, rows, step, "before a contact", 1e-5)
            elif gentle:
                self.robot(env, rows, step, "after a contact", 0.01)
            if gentle:
                self.see(
                    "object's place",
                    where,
                    position(env._of_object),
                    rows["object_pose"][step, :3],
                    0.01,
                    "m",
                )
            picture = path.parent / "images" / f"{path.stem}_step{step:02d}.png"
            if picture.exists() and (step < free or gentle):
                self.picture(env, picture, step)
        expected = expected_levels(rows)
        wrong = [
            step
            for step, level in enumerate(levels)
            if np.abs(expected[max(step - 1, 0) : step + 2] - level).min() > 1e-6
        ]
        self.see("steps with another reward", where, len(wrong), 0, 0)

    def see(self, *arguments: Any) -> None:
        self.largest.see(*arguments)

    def start(self, env: Any, recorded: Recorded) -> None:
        """Compare the first state."""
        where = "first states"
        objects = [actor.pose.raw_pose[0].tolist() for actor in env.objects]
        plates = [actor.pose.raw_pose[0].tolist() for actor in env.plates]
        self.see("poses of all objects", where, objects, recorded["object_poses"], 1e-6, "m")
        self.see("poses of all receptacles", where, plates, recorded["plate_poses"], 1e-6, "m")
        self.see(
            "robot's base", where, env.agent.robot.pose.raw_pose, recorded["base_pose"], 1e-6, "m"
        )
        self.see(
            "joints", where, env.agent.robot.get_qpos(), recorded["initial_qpos"], 1e-6, "rad, m"
        )
        self.see("boxes", where, env.object_size, recorded["object_bbox_world"], 1e-6, "m")
        self.see("boxes", where, env.plate_size, recorded["plate_bbox_world"], 1e-6, "m")
        self.see(
            "instructions that differ",
            where,
            env.get_language_instruction()[0] != recorded["instruction"],
            0,
            0,
        )
        camera = env.scene.sensors[scene25.CAMERA].get_params()
        self.see(
            "camera", where, camera["intrinsic_cv"], recorded["camera_intrinsic_cv"], 1e-3, "pixels"
        )
        self.see(
            "camera's place",
            where,
            camera["extrinsic_cv"][0],
            recorded["camera_extrinsic_cv"],
            1e-5,
            "m",
        )

    def targets(self, env: Any, rows: Any, step: int) -> None:
        parts = env.agent.controller.controllers
        where = "each step"
        self.see(
            "target of the tool",
            where,
            parts["arm"]._target_pose.raw_pose,
            rows["target_tcp_base"][step],
            1e-6,
            "m",
        )
        if step == len(rows["qpos"]) - 1:  # what was recorded for every step is the last target
            fingers = [joint._objs[0].drive_target[0] for joint in parts["gripper"].joints]
            self.see(
                "last target of the fingers",
                where,
                fingers,
                rows["target_gripper_qpos"][step],
                1e-6,
                "m",
            )

    def robot(self, env: Any, rows: Any, step: int, when: str, limit: float) -> None:
        robot = env.agent.robot
        self.see("joints", when, robot.get_qpos(), rows["qpos"][step], limit, "rad, m")
        self.see(
            "tool's place",
            when,
            robot.links_map["ee_gripper_link"].pose.p,
            rows["tcp_world"][step, :3],
            limit,
            "m",
        )

    def picture(self, env: Any, path: Path, step: int) -> None:
        """Compare a picture: the photograph exactly, what is shown on average."""
        ours = image(env)
        theirs = pixels(path).numpy().astype(int)
        difference = np.abs(ours - theirs).max(axis=-1)
        mask = pixels(path.with_name(f"{path.stem}_mask.png")).numpy() > 0
        when = "first pictures" if step == 0 else "later pictures"
        if step == 0:
            outside = cv2.dilate(mask.astype(np.uint8), GROWN) == 0
            self.see("pixels of the photograph", when, difference[outside].max(), 0, 0, "of 255")
        self.see("mean pixel of what is shown", when, difference[mask].mean(), 0, 3, "of 255")

    def controller(self) -> None:
        """Compare what single actions from rest do."""
        recorded = np.load(self.folder / "controller.npz")
        first = read(next(iter(sorted((self.folder / "episodes").glob("single_train_*.json")))))
        for number, action in enumerate(recorded["actions"]):
            env = self.begin(first)
            rest = np.array([*[0.0] * 6, action[6]], np.float32)
            rows = {
                name: recorded[name][number]
                for name in ("qpos", "tcp_world", "target_tcp_base", "target_gripper_qpos")
            }
            for step in range(len(rows["qpos"])):
                if step:
                    env.step(torch.from_numpy(action if step == 1 else rest)[None])
                self.targets(env, rows, step)
                self.robot(env, rows, step, "single actions", 1e-5)

    def drops(self) -> None:
        """Compare objects that fall on the middle of the plate; others may roll either way."""
        recorded = np.load(self.folder / "drops.npz")
        first = read(next(iter(sorted((self.folder / "episodes").glob("main_train_*.json")))))
        for number, chosen in enumerate(recorded["object_id"]):
            if recorded["distance"][number] > 0:
                continue
            env = self.begin(first)
            present = env.present[0]
            env.objects[present.object].set_pose(scene25._parked(1.0, present.object))
            env.present = [
                type(present)(
                    int(chosen),
                    present.plate,
                    present.table,
                    present.pair,
                    present.turn,
                    present.extra,
                )
            ]
            env.objects[int(chosen)].set_pose(pose(recorded["object_pose"][number, 0]))
            env.plates[present.plate].set_pose(pose(recorded["plate_pose"][number, 0]))
            env.object_size = torch.from_numpy(recorded["object_bbox_world"][number])[None]
            env.plate_size = torch.from_numpy(recorded["plate_bbox_world"][number])[None]
            answers = [
                bool(env.step(torch.tensor([[0.0] * 6 + [1.0]]))[4]["success"])
                for _ in recorded["success"][number, 1:]
            ]
            self.see("success", "drops", answers, recorded["success"][number, 1:], 0)
            self.see(
                "force at rest",
                "drops",
                env._between(),
                recorded["force_object_plate"][number, -1],
                0.01,
                "N",
            )

    def settled_starts(self) -> None:
        """Compare RL4VLA's starts, where objects have come to rest."""
        tasks = {
            read(path)["task"].removeprefix(PREFIX).split("-")[0].lower(): read(path)["task"]
            for path in self.paths("episodes")
        }
        where = "rl4vla_starts"
        elsewhere = []
        for name, recorded in read(self.folder / where / "starts.json").items():
            if "episode_id" not in recorded:
                continue
            task, obj_set, _ = name.rsplit("_", 2)
            env = self.begin(recorded | {"task": tasks[task], "obj_set": obj_set}, "rl4vla")
            self.see(
                "plate",
                where,
                env._of_plate(lambda actor: actor.pose.raw_pose),
                recorded["plate_pose"],
                1e-6,
                "m",
            )
            self.see("joints", where, env.agent.robot.get_qpos(), recorded["qpos"], 1e-6, "rad, m")
            object_position = position(env._of_object)[0].numpy()
            self.see(
                "object's place", where, object_position, recorded["object_pose"][:3], ROLLED, "m"
            )
            elsewhere.append(
                bool(np.abs(object_position - recorded["object_pose"][:3]).max() > ELSEWHERE)
            )
            self.see(
                "instructions that differ",
                where,
                env.get_language_instruction()[0] != recorded["instruction"],
                0,
                0,
            )
            if "image" in recorded:
                difference = np.abs(
                    image(env) - pixels(self.folder / where / recorded["image"]).numpy()
                )
                self.see("mean pixel", where, difference.mean(), 0, 0.5, "of 255")
        self.see("share of objects elsewhere", where, np.mean(elsewhere), 0, 0.5)

    def paths(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).glob("*.json"))


def contact_free(rows: Any) -> int:
    """Rows before the robot may have touched anything."""
    forces = np.abs(rows["force_finger1_object"]).max(axis=1) + np.abs(
        rows["force_finger2_object"]
    ).max(axis=1)
    touched = (forces[1:] > 0) | (rows["tcp_world"][1:, 2] < FINGERS_FREE)
    return int(np.argmax(touched)) + 1 if touched.any() else len(forces)


def expected_levels(rows: Any) -> NDArray[np.float64]:
    """Levels of the reward that follow from the recorded grasps and successes.

    Not the recorded ones: the published environment counts a grasp that the simulation still
    knows from the episode before, at the moment of a reset.
    """
    progress = Progress(1, torch.device("cpu"))
    levels = [0.0]
    for grasping, success in zip(rows["grasping_now"][1:], rows["success"][1:], strict=True):
        progress.count(torch.tensor([True]), torch.tensor([bool(grasping)]))
        levels.append(float(progress.level(torch.tensor([bool(success)]))))
    return np.array(levels)


def position(of: Any) -> Any:
    return of(lambda actor: actor.pose.p)


def pose(numbers: NDArray[np.float32]) -> Any:
    import sapien

    return sapien.Pose(numbers[:3], numbers[3:])


def image(env: Any) -> NDArray[np.int64]:
    rgb: NDArray[np.int64] = (
        env._get_obs_sensor_data()[scene25.CAMERA]["rgb"][0].numpy().astype(int)
    )
    return rgb


def main(folder: Path, render_backend: str) -> None:
    torch.set_num_threads(1)
    fast_paths.install_shared()
    fast_paths.install()
    comparison = Played(folder, render_backend)
    for kind in ("episodes", "success"):
        for path in comparison.paths(kind):
            comparison.episode(path)
    comparison.controller()
    comparison.drops()
    comparison.settled_starts()
    print(json.dumps([asdict(row) for row in comparison.largest.found.values()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
