"""Simulator process of ManiSkill: single environments on the CPU."""

from __future__ import annotations

import gc
import os
import platform
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..serving import Seen, SimulatorSpec, SimulatorUnavailable, Step, serve
from .doctor import NO_DRIVER
from .lowpoly import low_poly_visuals

PICTURE_SIZE = 256
"""Height and width of images for display, in pixels."""


def make(options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> Any:
    """Make a ManiSkill base environment (batched for ``num_envs`` > 1) that renders on request."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    from mani_skill.utils import sapien_utils

    from . import put_on_plate  # noqa: F401  (registers the task)

    sensors: dict[str, Any] = {}
    if not options["bridge"]:  # bridge tasks overlay a photograph of fixed size
        sensors = {"width": options["image_size"], "height": options["image_size"], "shader_pack": "minimal"}
    if options["close_view"]:
        eye, target, fov = options["close_view"]
        sensors |= {"pose": sapien_utils.look_at(eye, target), "fov": fov}
    reward_mode = "none" if options["bridge"] else "normalized_dense" if options["reward"] == "progress" else options["reward"]
    keywords = {"robot_uids": options["robot"]} if options["robot"] else {}
    try:
        env: Any = gymnasium.make(
            options["gym_id"],
            num_envs=num_envs,
            obs_mode="rgb+segmentation" if options["bridge"] else "rgb",
            control_mode=options["control_mode"],
            reward_mode=reward_mode,
            render_mode="rgb_array",
            sim_backend=sim_backend,
            render_backend=render_backend,
            sensor_configs={options["camera"]: sensors},
            human_render_camera_configs={"width": PICTURE_SIZE, "height": PICTURE_SIZE},
            max_episode_steps=sys.maxsize,  # the vector environment counts control steps
            **keywords,
        ).unwrapped
    except RuntimeError as error:
        if any(sign in str(error) for sign in ("ErrorIncompatibleDriver", "supported physical device", "rendering device")):
            raise SimulatorUnavailable(NO_DRIVER) from error
        raise
    # Steps and resets now render nothing; _get_obs_sensor_data still uses obs_mode_struct.
    env._obs_mode = "none"
    return env


def rotation_signs(env: Any) -> NDArray[np.float32]:
    """Signs ``[D]`` to multiply actions with.

    ManiSkill's normalised end-effector rotations are inverted: it scales them by the lower limit,
    -0.1 rad.
    """
    from mani_skill.agents.controllers import PDEEPoseController

    controller = env.agent.controller
    signs = np.ones(env.single_action_space.shape, np.float32)
    for name, (begin, end) in getattr(controller, "action_mapping", {}).items():
        part = controller.controllers[name]
        if isinstance(part, PDEEPoseController) and part.config.normalize_action:
            signs[begin + 3 : end] = -1
    return signs


def tool_units(env: Any) -> list[float] | None:
    """[m, rad] that 1 means in an action; None if actions do not move a tool and a gripper."""
    from mani_skill.agents.controllers import PDEEPosController, PDEEPoseController

    controllers = getattr(env.agent.controller, "controllers", {})
    arm = controllers.get("arm")
    if "gripper" not in controllers or not isinstance(arm, PDEEPosController) or not arm.config.use_delta:
        return None
    if not arm.config.normalize_action:
        return [1.0, 1.0]
    return [float(arm.config.pos_upper), float(arm.config.rot_upper) if isinstance(arm, PDEEPoseController) else 0.0]


def stack(env: Any) -> dict[str, str]:
    """Everything besides seed and actions that determines an episode's exact results."""
    from importlib.metadata import version

    from sapien.render import get_device_summary

    versions = {name: version(name) for name in ("mani_skill", "sapien", "numpy", "torch")}
    devices = [line.removeprefix("GPU: ") for line in get_device_summary().splitlines() if line.startswith("GPU: ")]
    return versions | {"python": platform.python_version(), "physics": str(env.backend.sim_backend), "renderer": ", ".join(devices)}


def tool_pose(env: Any) -> Any:
    """Tool centre point x y z (m, table frame), quaternion w x y z: float32 ``[num_envs, 7]``."""
    agent = env.agent
    if hasattr(agent, "tcp_pose"):
        return agent.tcp_pose.raw_pose
    link = agent.tcp if hasattr(agent, "tcp") else agent.robot.links_map["ee_gripper_link"]
    return link.pose.raw_pose


def proprioception(env: Any) -> Any:
    """``tool_pose`` and the last gripper joint: float32 ``[num_envs, 8]``.

    The joint is in m or rad, and 0 for a robot without a gripper.
    """
    import torch

    gripper = env.agent.robot.get_qpos()[:, -1:]
    if not getattr(env.agent, "gripper_joint_names", None):
        gripper = torch.zeros_like(gripper)
    return torch.cat([tool_pose(env), gripper], dim=1).float()


class Outcome:
    """Compute rewards and successes of one ManiSkill environment, which may be a batch."""

    def __init__(self, env: Any, options: dict[str, Any]) -> None:
        self._env, self._bridge, self._progress = env, options["bridge"], options["reward"] == "progress"
        self._dense: Any = None

    def begin(self, rows: Any = slice(None)) -> None:
        """Record that episodes began in ``rows``."""
        if not self._progress:
            return
        env = self._env
        dense = env.get_reward({}, env.agent.robot.get_qpos(), env.get_info())  # from the state alone, before any action
        if self._dense is None:
            self._dense = dense.clone()
        self._dense[rows] = dense[rows]

    def __call__(self, reward: Any, info: dict[str, Any]) -> tuple[Any, Any]:
        """Reward float32 and success bool of a step, each ``[num_envs]``."""
        import torch

        success = info.get("success", torch.zeros_like(reward, dtype=torch.bool)).bool()
        if self._bridge:  # bridge tasks define no reward
            return success.float(), success
        if self._progress:
            reward, self._dense = reward - self._dense, reward.clone()
        return reward.float(), success


class ManiSkillSimulator:
    """Implements ``serving.Simulator``."""

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        import mani_skill.envs  # noqa: F401  (now, so that gc.freeze below covers it)
        import torch

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # ManiSkill collects garbage with every new scene; scanning the imported modules would take 0.1 s
        self._visuals = ExitStack()  # for the life of the process: every reset builds a new scene
        if options["low_poly"]:
            self._visuals.enter_context(low_poly_visuals())
        self._options = options
        self._envs = [make(options, 1, "physx_cpu", options["render_backend"]) for _ in range(slots)]
        self._outcomes = [Outcome(env, options) for env in self._envs]
        env = self._envs[0]
        self._signs = rotation_signs(env)
        self._size = (options["image_size"], options["image_size"])
        self.spec = SimulatorSpec(
            action_dim=len(self._signs),
            state_dim=8,
            control_hz=float(env.control_freq),
            images={"base": list(self._size)},
            picture=[PICTURE_SIZE] * 2,
            tool=tool_units(env),
            stack=stack(env),
        )

    def reset(self, slot: int, seed: int, task: int) -> str:
        env = self._envs[slot]
        # PhysX keeps contacts in an order that depends on earlier episodes and changes results. A
        # new scene, which costs about 4 control steps, prevents that.
        env.reset(seed=seed, options={"reconfigure": True})
        self._outcomes[slot].begin()
        if hasattr(env, "get_language_instruction"):
            return str(env.get_language_instruction()[0])
        return str(self._options["instruction"])

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        env = self._envs[slot]
        _, reward, terminated, _, info = env.step((action * self._signs)[None])
        reward, success = self._outcomes[slot](reward, info)
        return Step(float(reward[0]), bool(terminated[0]), bool(success[0]))

    def observe(self, slot: int) -> Seen:
        env = self._envs[slot]
        image = env._get_obs_sensor_data()[self._options["camera"]]["rgb"][0].cpu().numpy()
        if image.shape[:2] != self._size:
            import cv2

            image = cv2.resize(image, self._size[::-1], interpolation=cv2.INTER_AREA)
        return Seen(proprioception(env)[0].numpy(), {"base": image})

    def expert(self, slot: int) -> NDArray[np.float32]:
        from .experts import expert_actions

        return expert_actions(self._envs[slot])[0].numpy()

    def render(self, slot: int) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self._envs[slot].render()[0].cpu().numpy()
        return picture


if __name__ == "__main__":
    os.environ["MS_SKIP_ASSET_DOWNLOAD_PROMPT"] = "1"
    serve(ManiSkillSimulator)
