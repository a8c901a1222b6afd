"""ManiSkill's environments, and the cpu backend: single ones in a process."""

from __future__ import annotations

import gc
import os
import platform
import sys
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_vla.config.errors import UserError

from ..serving import PICTURE_SIZE, Seen, Step, serve
from ..shared_arrays import SimulatorSpec
from . import fast_paths
from .config import meaning
from .experts import expert_actions
from .lowpoly import low_poly_visuals
from .vulkan import NO_DRIVER


def make(options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> Any:
    """Make a ManiSkill base environment (batched for ``num_envs`` > 1) that renders on request."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    from mani_skill.utils import sapien_utils

    from . import put_on_plate, put_on_plate_25, scene25  # noqa: F401  (registers the tasks)

    fast_paths.install_shared()
    sensors: dict[str, Any] = {}
    if not options["bridge"]:  # bridge tasks overlay a photograph of fixed size
        height, width = options["images"]["base"]
        sensors = {"width": width, "height": height, "shader_pack": "minimal"}
    if options["close_view"]:
        eye, target, fov = options["close_view"]
        sensors |= {"pose": sapien_utils.look_at(eye, target), "fov": fov}
    reward_mode = {None: "none", "progress": "normalized_dense"}.get(
        options["reward"], options["reward"]
    )
    keywords = {
        key: options[name]
        for key, name in (("robot_uids", "robot"), ("split", "split"))
        if options[name]
    }
    keywords |= options["scene25"] or {}
    try:
        env: Any = gymnasium.make(
            options["gym_id"],
            num_envs=num_envs,
            obs_mode=_modes(options),
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
        if any(
            sign in str(error)
            for sign in ("ErrorIncompatibleDriver", "supported physical device", "rendering device")
        ):
            raise UserError(NO_DRIVER) from error
        raise
    # Steps and resets now render nothing; _get_obs_sensor_data still uses obs_mode_struct.
    env._obs_mode = "none"
    return env


def _modes(options: dict[str, Any]) -> str:
    """What ManiSkill renders."""
    if options["bridge"]:
        return "rgb+segmentation"
    return "rgb+depth" if "base_depth" in options["images"] else "rgb"


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
    if (
        "gripper" not in controllers
        or not isinstance(arm, PDEEPosController)
        or not arm.config.use_delta
    ):
        return None
    if not arm.config.normalize_action:
        return [1.0, 1.0]
    return [
        float(arm.config.pos_upper),
        float(arm.config.rot_upper) if isinstance(arm, PDEEPoseController) else 0.0,
    ]


def stack(env: Any) -> dict[str, str]:
    """Everything besides seed and actions that determines an episode's exact results."""
    from importlib.metadata import version

    from sapien.render import get_device_summary

    versions = {name: version(name) for name in ("mani_skill", "sapien", "numpy", "torch")}
    devices = [
        line.removeprefix("GPU: ")
        for line in get_device_summary().splitlines()
        if line.startswith("GPU: ")
    ]
    return versions | {
        "python": platform.python_version(),
        "physics": str(env.backend.sim_backend),
        "renderer": ", ".join(devices),
    }


def tool_pose(env: Any) -> Tensor:
    """Tool centre point x y z (m), quaternion w x y z: float32 ``[num_envs, 7]``.

    In the frame of the table; a WidowX's, whose actions are in the frame of its base, in that one.
    """
    agent = env.agent
    if hasattr(agent, "tcp_pose"):
        return agent.tcp_pose.raw_pose
    if hasattr(agent, "tcp"):
        return agent.tcp.pose.raw_pose
    return (agent.robot.pose.inv() * agent.robot.links_map["ee_gripper_link"].pose).raw_pose


def closed_gripper(env: Any) -> Tensor:
    """Where the last gripper joint of an arm that moves a tool is closed (m); 0 of other robots."""
    lowest: Tensor = env.agent.robot.get_qlimits()[:, -1:, 0]
    return torch.zeros_like(lowest) if tool_units(env) is None else lowest


def proprioception(env: Any, closed: Tensor) -> Tensor:
    """``tool_pose`` and the last gripper joint: float32 ``[num_envs, 8]``.

    The joint is in m from ``closed`` or in rad, and 0 for a robot without a gripper.
    """
    gripper = env.agent.robot.get_qpos()[:, -1:] - closed
    if not getattr(env.agent, "gripper_joint_names", None):
        gripper = torch.zeros_like(gripper)
    return torch.cat([tool_pose(env), gripper], dim=1).float()


class ManiSkillEnv:
    """One ManiSkill base environment, which may be a batch, as in docs/conventions.md."""

    def __init__(
        self, options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str
    ) -> None:
        self.env = make(options, num_envs, sim_backend, render_backend)
        """ManiSkill's own."""
        self.options = options
        self.num_envs = num_envs
        self._signs = torch.from_numpy(rotation_signs(self.env)).to(self.env.device)
        self._closed = closed_gripper(self.env)
        self._dense: Any = None
        """Dense reward ``[num_envs]`` of the present state, for ``progress``."""

    @cached_property
    def spec(self) -> SimulatorSpec:
        instructions = (
            [] if hasattr(self.env, "get_language_instruction") else [self.options["instruction"]]
        )
        if self.options["scene25"]:
            instructions = self.env.instructions
        return SimulatorSpec(
            action_dim=len(self._signs),
            state_dim=self.state().shape[1],
            control_hz=float(self.env.control_freq),
            images=self.options["images"],
            picture=[PICTURE_SIZE] * 2,
            **meaning(self.options["state"], tool_units(self.env)),
            instructions=instructions,
            stack=stack(self.env),
        )

    def state(self) -> Tensor:
        """The robot's state, float32 ``[num_envs, D]``."""
        return (
            proprioception(self.env, self._closed)
            if self.options["state"] == "tool"
            else self.env.agent.robot.get_qpos().float()
        )

    def begun(self, rows: list[int]) -> list[str]:
        """Record that episodes began in ``rows``; return the present instruction of each row."""
        env = self.env
        if self.options["reward"] == "progress":
            dense = env.get_reward(
                {}, env.agent.robot.get_qpos(), env.get_info()
            )  # from the state alone, before any action
            if self._dense is None:
                self._dense = dense.clone()
            self._dense[rows] = dense[rows]
        if hasattr(env, "get_language_instruction"):
            return [str(text) for text in env.get_language_instruction()]
        return [self.options["instruction"]] * self.num_envs

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one control step; return what ``Batch.step`` does."""
        _, reward, terminated, _, info = self.env.step(actions * self._signs)
        success = info.get("success", torch.zeros_like(reward, dtype=torch.bool)).bool()
        if self.options["reward"] is None:  # bridge tasks define none
            reward = success
        elif self.options["reward"] == "progress":
            reward, self._dense = reward - self._dense, reward.clone()
        if not self.options["success_ends"]:
            terminated = terminated & ~success
        return reward.float(), terminated, success

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """State float32 ``[R, D]`` and images ``[R, H, W, channels]`` of ``R`` rows."""
        sensor = self.env._get_obs_sensor_data()[self.options["camera"]]
        textures = {"base": "rgb", "base_depth": "depth"}
        return self.state()[rows], {
            name: sensor[textures[name]].to(self.env.device)[rows]
            for name in self.options["images"]
        }

    def expert(self) -> Tensor:
        return expert_actions(self.env)

    def render(self, index: int) -> Tensor:
        picture: Tensor = self.env.render()[index].cpu()
        return picture


class ManiSkillSimulator:
    """The cpu backend: implements ``serving.Simulator``."""

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        import mani_skill.envs  # noqa: F401  (now, so that gc.freeze below covers it)

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # ManiSkill collects garbage with every new scene; scanning the imported modules would take 0.1 s
        fast_paths.install()
        self._visuals = ExitStack()  # for the life of the process: every reset builds a new scene
        if options["low_poly"]:
            self._visuals.enter_context(low_poly_visuals())
        self.slots = [
            ManiSkillEnv(options, 1, "physx_cpu", options["render_backend"]) for _ in range(slots)
        ]
        self.spec = self.slots[0].spec

    def reset(self, slot: int, seed: int, task: int) -> str:
        # PhysX keeps contacts in an order that depends on earlier episodes and changes results. A
        # new scene, which costs about 7 control steps, prevents that.
        self.slots[slot].env.reset(seed=seed, options={"reconfigure": True})
        return self.slots[slot].begun([0])[0]

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        reward, terminated, success = self.slots[slot].step(torch.from_numpy(action)[None])
        return Step(float(reward[0]), bool(terminated[0]), bool(success[0]))

    def observe(self, slot: int) -> Seen:
        state, images = self.slots[slot].observe([0])
        shown = {name: picture[0].numpy() for name, picture in images.items()}
        (height, width) = self.spec.images["base"]
        if shown["base"].shape[:2] != (height, width):
            import cv2

            shown["base"] = cv2.resize(shown["base"], (width, height), interpolation=cv2.INTER_AREA)
        return Seen(state[0].numpy(), shown)

    def expert(self, slot: int) -> NDArray[np.float32]:
        return self.slots[slot].expert()[0].numpy()

    def render(self, slot: int) -> NDArray[np.uint8]:
        return self.slots[slot].render(0).numpy()


if __name__ == "__main__":
    os.environ["MS_SKIP_ASSET_DOWNLOAD_PROMPT"] = "1"
    serve(ManiSkillSimulator)
