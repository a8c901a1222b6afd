"""Things to know about the ManiSkill side that need a simulator in the asking process, or with ``experts`` how often the experts succeed.

Prints one JSON object; run by test_maniskill_facts.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mani_skill.agents.controllers import PDEEPoseController, PDJointPosController
from mani_skill.utils.geometry import rotation_conversions
from mani_skill.utils.structs import Pose
from mani_skill.utils.structs.render_camera import RenderCamera
from numpy.typing import NDArray
from torch import Tensor

from rlinf_vla.core.types import Episodes
from rlinf_vla.envs.maniskill import put_on_plate
from rlinf_vla.envs.maniskill.batch import ManiSkillBatch, Targets
from rlinf_vla.envs.maniskill.config import ManiSkillConfig
from rlinf_vla.envs.maniskill.plugin import simulator_options
from rlinf_vla.envs.maniskill.simulator import ManiSkillSimulator
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.vector_env import ProcessVectorEnv


def simulator(**config: Any) -> ManiSkillSimulator:
    return ManiSkillSimulator(
        {**simulator_options(ManiSkillConfig(**config)), "render_backend": "cpu"}, 1
    )


def expert_success(
    task: str, control_mode: str = "pd_ee_delta_pos", episodes: int = 5, noise: float = 0.0
) -> float:
    """Share of episodes that the expert solves within the task's own limit, under Gaussian noise on every action."""
    sim = simulator(task=task, control_mode=control_mode)
    successes = 0
    for seed in range(episodes):
        rng = np.random.RandomState(seed)
        sim.reset(0, seed, 0)
        for _ in range(50):
            action = sim.expert(0)
            step = sim.step(0, (action + noise * rng.normal(size=action.shape)).astype(np.float32))
            if step.terminated:
                successes += step.success
                break
    return successes / episodes


def after_a_success() -> dict[str, list[bool]]:
    """Of the expert's steps: whether the first success ended the episode, and whether a later step was a success, too."""
    found = {}
    for ends in (True, False):
        sim = simulator(task="PushCube", success_ends=ends)
        sim.reset(0, 0, 0)
        steps = [sim.step(0, sim.expert(0)) for _ in range(50)]
        successes = [step for step in steps if step.success]
        found[str(ends)] = [
            successes[0].terminated,
            any(step.terminated for step in steps),
            len(successes) > 1,
        ]
    return found


def rotation_vector(before: NDArray[np.float32], after: NDArray[np.float32]) -> list[float]:
    """Of the turn from one unit quaternion (w, x, y, z) to another, in the fixed frame, radians (small angles)."""
    w, x, y, z = after
    a, b, c, d = before * [1, -1, -1, -1]
    turn = [
        w * a - x * b - y * c - z * d,
        w * b + x * a + y * d - z * c,
        w * c - x * d + y * a + z * b,
        w * d + x * c - y * b + z * a,
    ]
    return [float(2 * part * np.sign(turn[0])) for part in turn[1:]]


def turns() -> list[list[float]]:
    """What ten steps of +1 about each axis do: the tool's rotation vector."""
    sim = simulator(task="PushCube", control_mode="pd_ee_delta_pose")
    answers = []
    for axis in range(3):
        sim.reset(0, 0, 0)
        start = sim.observe(0).state[3:7]
        for _ in range(10):
            sim.step(0, np.eye(7, dtype=np.float32)[3 + axis])
        answers.append(rotation_vector(start, sim.observe(0).state[3:7]))
    return answers


def trajectory(sim: ManiSkillSimulator, actions: NDArray[np.float32]) -> list[bytes]:
    sim.reset(0, 7, 0)
    states = []
    for action in actions:
        sim.step(0, action)
        states.append(sim.observe(0).state.tobytes())
    return states


def low_poly_is_the_same_physics() -> bool:
    actions = np.random.RandomState(0).normal(0.0, 0.5, (15, 4)).astype(np.float32)
    low, stock = (
        simulator(task="PushCube", robot_visuals=visuals) for visuals in ("low_poly", "stock")
    )
    return trajectory(low, actions) == trajectory(stock, actions)


def a_batch_of_one_is_the_cpu_backend() -> bool:
    config = {"task": "PushCube", "reward": "progress"}
    actions = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0)) * 0.5
    options = {
        **simulator_options(ManiSkillConfig(**config)),
        "sim_backend": "physx_cpu",
        "render_backend": "cpu",
    }
    program = ["-m", "rlinf_vla.envs.maniskill.batch"]
    env = ProcessVectorEnv(
        SimulatorPool(program, options, slots=1, processes=1, episode_limit=8), ("PushCube",)
    )
    result = [
        env.reset(Episodes.first_attempts(torch.zeros(1).long(), torch.tensor([seed])))
        for seed in (3, 4)
    ] and env.step(actions)
    seen = result.observation
    sim = simulator(**config)  # takes ManiSkill's fast paths, and the batch does not
    instruction = [sim.reset(0, seed, 0) for seed in (3, 4)][-1]
    rewards = [sim.step(0, action.numpy()).reward for action in actions[0, :8]]
    state, images = sim.observe(0)
    same = (
        torch.equal(seen.state[0], torch.from_numpy(state))
        and torch.equal(seen.images["base"][0], torch.from_numpy(images["base"]))
        and seen.instruction == [instruction]
        and result.valid.sum() == 8
        and result.reward[0].tolist() == [*rewards, 0.0]
        and all(rewards)
        and bool(result.truncated[0, 7])
        and env.expert_actions().shape == (1, 4)
        and env.render(0).shape == (256, 256, 3)
    )
    env.close()
    return same


def reset_while_grasping() -> dict[str, float]:
    """Of a batch, whose scene is not rebuilt: what a new episode knows of the last one's grasp, and its first reward."""
    options = {
        **simulator_options(ManiSkillConfig(task="PutOnPlate", reward="progress")),
        "sim_backend": "physx_cpu",
    }
    batch = ManiSkillBatch(options, 1, "physx_cpu", "cpu")

    def grasping() -> float:
        return float(batch.env.of_target(batch.env.agent.is_grasping))

    batch.reset([3], [0])
    before = 0.0
    for _ in range(50):
        batch.step(batch.expert())
        if before := grasping():
            break
    batch.reset([3], [0])
    found = {
        "before": before,
        "after": grasping(),
        "reward": float(batch.step(torch.zeros(1, 4))[0]),
    }
    batch.close()
    return found


def targets_after_a_reset() -> dict[str, list[bool]]:
    """Of three environments of which the second is reset: whose targets its controllers set anew."""
    scene = SimpleNamespace(_reset_mask=torch.ones(3, dtype=torch.bool))
    began: dict[str, list[bool]] = {}
    for kind in (PDJointPosController, PDEEPoseController):
        here = {"qpos": torch.zeros(3, 2), "ee_pose_at_base": Pose(raw_pose=torch.zeros(3, 7))}
        controller = object.__new__(type("Still", (kind,), here))
        controller.scene = scene
        controller.config = SimpleNamespace(use_target=True)
        controller._start_qpos = controller._target_qpos = None
        controller.reset()
        controller._target_qpos = torch.ones(3, 2)
        controller._target_pose = Pose(raw_pose=torch.ones(3, 7))
        with Targets(controller, scene).of_rows(torch.tensor([1])):
            controller.reset()
        reached = (
            controller._target_qpos
            if kind is PDJointPosController
            else controller._target_pose.raw_pose
        )
        began[kind.__name__] = (reached == 0).all(dim=1).tolist()
    return began | {"mask": scene._reset_mask.tolist()}


def quaternion_products(multiply: Callable[[Tensor, Tensor], Tensor]) -> list[bytes]:
    """Of pairs of quaternions that are random, not normalised, signed zeros, and of shapes to broadcast."""
    random = torch.Generator().manual_seed(0)
    zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0], [-0.0, -0.0, 1.0, 0.0]])
    left = [torch.randn(500, 4, generator=random), torch.randn(1, 4, generator=random), zeros]
    right = [
        torch.randn(500, 4, generator=random) * 1e3,
        torch.randn(3, 4, generator=random),
        zeros.flip(0),
    ]
    return [multiply(one, other).numpy().tobytes() for one, other in zip(left, right, strict=True)]


def pose_products() -> list[bytes]:
    """Of random poses, of shapes to broadcast, and of their inverses."""
    random = torch.Generator().manual_seed(0)
    left, right = (Pose.create(torch.randn(500, 7, generator=random)) for _ in range(2))
    first, second = Pose.create(left.raw_pose[:1]), Pose.create(right.raw_pose[:3])
    found = [left * right, first * second, second * first, left.inv(), first * second[0].sp]
    return [each.raw_pose.numpy().tobytes() for each in found]


def pictures() -> list[bytes]:
    """Of the policy's camera and of the one for people."""
    sim = simulator(task="PutOnPlate")
    sim.reset(0, 0, 0)
    return [sim.observe(0).images["base"].tobytes(), sim.render(0).tobytes()]


def layouts() -> dict[str, Any]:
    """Over many episodes: the least distances, and how often each colour is the instructed one."""
    apart = []
    to_plate = []
    targets = [0, 0, 0]
    for seed in range(300):
        target, plate, cubes = put_on_plate.sample_layout(np.random.RandomState(seed))
        targets[target] += 1
        apart += [float(np.linalg.norm(cubes[i] - cubes[j])) for i in range(3) for j in range(i)]
        to_plate += [float(np.linalg.norm(cube - plate)) for cube in cubes]
    return {"apart": min(apart), "to_plate": min(to_plate), "targets": targets}


def instructions() -> list[list[str]]:
    """Of some episodes: what the robot is told, and which colour the environment waits for."""
    sim = simulator(task="PutOnPlate")
    colours = list(put_on_plate.COLOURS)
    return [[sim.reset(0, seed, 0), colours[int(sim.slots[0].env.target[0])]] for seed in range(12)]


def progress_rewards() -> list[float]:
    """Of an expert's episode of PutOnPlate, and of the start of the next one."""
    sim = simulator(task="PutOnPlate", reward="progress")
    rewards = []
    done = False
    sim.reset(0, 2, 0)
    while not done:
        step = sim.step(0, sim.expert(0))
        rewards.append(step.reward)
        done = step.terminated
    sim.reset(0, 3, 0)
    return [*rewards, sim.step(0, sim.expert(0)).reward]


def experts() -> dict[str, Any]:
    return {
        "alone": {
            task: expert_success(task)
            for task in ("PushCube", "PickCube", "StackCube", "PutOnPlate")
        },
        "in_poses": expert_success("PutOnPlate", "pd_ee_delta_pose", episodes=2),
        "under_noise": {
            task: expert_success(task, noise=0.3) for task in ("PushCube", "PutOnPlate")
        },
    }


def facts() -> dict[str, Any]:
    stock = quaternion_products(rotation_conversions.quaternion_raw_multiply) + pose_products()
    stock_cameras = RenderCamera.create
    warm = simulator()  # as long as one lives the renderer is not built anew
    RenderCamera.create, ours = stock_cameras, RenderCamera.create
    stock_pictures = pictures()
    RenderCamera.create = ours
    return {
        "turns": turns(),
        "after_a_success": after_a_success(),
        "low_poly_is_the_same_physics": low_poly_is_the_same_physics(),
        "a_batch_of_one_is_the_cpu_backend": a_batch_of_one_is_the_cpu_backend(),
        "reset_while_grasping": reset_while_grasping(),
        "targets_after_a_reset": targets_after_a_reset(),
        "poses_have_the_same_bits": stock
        == quaternion_products(rotation_conversions.quaternion_raw_multiply) + pose_products(),
        "pictures_have_the_same_bits": stock_pictures == pictures(),
        "kinematics": type(
            warm.slots[0].env.agent.controller.controllers["arm"].kinematics.pmodel
        ).__module__,
        "layouts": layouts(),
        "instructions": instructions(),
        "progress_rewards": progress_rewards(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(experts() if "experts" in sys.argv else facts()))
