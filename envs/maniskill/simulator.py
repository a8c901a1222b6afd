"""ManiSkill's environments: single ones in a process on the CPU, or one batch on the GPU."""

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

from ..batch_serving import BatchServer
from ..serving import PICTURE_SIZE, Seen, Step, serve
from ..shared_arrays import SimulatorSpec
from . import fast_paths
from .experts import expert_actions
from .lowpoly import low_poly_visuals
from .tasks import STATE_DIM
from .vulkan import NO_DRIVER


def make(options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> Any:
    """Make a ManiSkill base environment (batched for ``num_envs`` > 1) that renders on request."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    from mani_skill.utils import sapien_utils

    from . import put_on_plate, put_on_plate_25  # noqa: F401  (registers the tasks)

    fast_paths.install_shared()
    sensors: dict[str, Any] = {}
    if not options["bridge"]:  # bridge tasks overlay a photograph of fixed size
        sensors = {"width": options["image_size"], "height": options["image_size"], "shader_pack": "minimal"}
    if options["close_view"]:
        eye, target, fov = options["close_view"]
        sensors |= {"pose": sapien_utils.look_at(eye, target), "fov": fov}
    reward_mode = "none" if options["bridge"] else "normalized_dense" if options["reward"] == "progress" else options["reward"]
    keywords = ({"robot_uids": options["robot"]} if options["robot"] else {}) | ({"split": options["split"]} if options["split"] else {})
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
            raise UserError(NO_DRIVER) from error
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


def tool_pose(env: Any) -> Tensor:
    """Tool centre point x y z (m, table frame), quaternion w x y z: float32 ``[num_envs, 7]``."""
    agent = env.agent
    if hasattr(agent, "tcp_pose"):
        return agent.tcp_pose.raw_pose
    link = agent.tcp if hasattr(agent, "tcp") else agent.robot.links_map["ee_gripper_link"]
    return link.pose.raw_pose


def proprioception(env: Any) -> Tensor:
    """``tool_pose`` and the last gripper joint: float32 ``[num_envs, 8]``.

    The joint is in m or rad, and 0 for a robot without a gripper.
    """
    gripper = env.agent.robot.get_qpos()[:, -1:]
    if not getattr(env.agent, "gripper_joint_names", None):
        gripper = torch.zeros_like(gripper)
    return torch.cat([tool_pose(env), gripper], dim=1).float()


class ManiSkillEnv:
    """One ManiSkill base environment, which may be a batch, as in docs/conventions.md."""

    def __init__(self, options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> None:
        self.env = make(options, num_envs, sim_backend, render_backend)
        """ManiSkill's own."""
        self.options, self.num_envs = options, num_envs
        self._signs = torch.from_numpy(rotation_signs(self.env)).to(self.env.device)
        self._dense: Any = None
        """Dense reward ``[num_envs]`` of the present state, for ``progress``."""

    @cached_property
    def spec(self) -> SimulatorSpec:
        return SimulatorSpec(
            action_dim=len(self._signs),
            state_dim=STATE_DIM,
            control_hz=float(self.env.control_freq),
            images={"base": [self.options["image_size"]] * 2},
            picture=[PICTURE_SIZE] * 2,
            tool=tool_units(self.env),
            instructions=[] if hasattr(self.env, "get_language_instruction") else [self.options["instruction"]],
            stack=stack(self.env),
        )

    def begun(self, rows: list[int]) -> list[str]:
        """Record that episodes began in ``rows``; return the present instruction of each row."""
        env = self.env
        if self.options["reward"] == "progress":
            dense = env.get_reward({}, env.agent.robot.get_qpos(), env.get_info())  # from the state alone, before any action
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
        if self.options["bridge"]:  # bridge tasks define no reward
            reward = success
        elif self.options["reward"] == "progress":
            reward, self._dense = reward - self._dense, reward.clone()
        return reward.float(), terminated, success

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """State float32 ``[R, 8]`` and image uint8 ``[R, H, W, 3]`` of ``R`` rows."""
        image = self.env._get_obs_sensor_data()[self.options["camera"]]["rgb"]
        return proprioception(self.env)[rows], {"base": image.to(self.env.device)[rows]}

    def expert(self) -> Tensor:
        return expert_actions(self.env)

    def render(self, index: int) -> Tensor:
        picture: Tensor = self.env.render()[index].cpu()
        return picture


class ManiSkillBatch(ManiSkillEnv):
    """The gpu backend: implements ``Batch``; each process makes its own scene on the GPU.

    Tested without a GPU, as a batch of one on the CPU, where it is bit-identical to the cpu
    backend. Untested: ``physx_cuda`` itself, its speed and its memory. GPU trajectories differ from
    CPU ones, and PhysX does not guarantee that they repeat.
    """

    def __init__(self, options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> None:
        with ExitStack() as visuals:
            if options["low_poly"]:
                visuals.enter_context(low_poly_visuals())
            super().__init__(options, num_envs, sim_backend, render_backend)
        self.device = torch.device(self.env.device)
        self._initialize, self.env._initialize_episode = self.env._initialize_episode, self._initialize_one_by_one
        self._is_grasping, self.env.agent.is_grasping = self.env.agent.is_grasping, self._is_grasping_now

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        self.env.reset(seed=seeds, options={"env_idx": torch.tensor(rows, device=self.device)})
        return self.begun(rows)

    def _is_grasping_now(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Answer no until an episode's first step: PhysX still has the last episode's contacts."""
        found: Tensor = self._is_grasping(*arguments, **keywords)
        return found & (self.env.elapsed_steps > 0)

    def _initialize_one_by_one(self, rows: Tensor, options: dict[str, Any]) -> None:
        """Initialise each row separately, with its own generators.

        ManiSkill draws the layouts of all rows from the seed of environment 0, but an episode must
        depend on its own seed alone.
        """
        env = self.env
        for row in rows.tolist():
            torch.manual_seed(int(env._episode_seed[row]))  # ManiSkill restores the global generator after the reset
            env._episode_rng = env._batched_episode_rng[row]
            env.scene._reset_mask = torch.zeros_like(env.scene._reset_mask)
            env.scene._reset_mask[row] = True
            self._initialize(torch.tensor([row], device=self.device), options)

    def close(self) -> None:
        self.env.close()


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
        self.slots = [ManiSkillEnv(options, 1, "physx_cpu", options["render_backend"]) for _ in range(slots)]
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
        image, (height, width) = images["base"][0].numpy(), self.spec.images["base"]
        if image.shape[:2] != (height, width):
            import cv2

            image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
        return Seen(state[0].numpy(), {"base": image})

    def expert(self, slot: int) -> NDArray[np.float32]:
        return self.slots[slot].expert()[0].numpy()

    def render(self, slot: int) -> NDArray[np.uint8]:
        return self.slots[slot].render(0).numpy()


def create_batch(options: dict[str, Any], slots: int) -> ManiSkillBatch:
    return ManiSkillBatch(options, slots, options["sim_backend"], options["render_backend"])


if __name__ == "__main__":
    os.environ["MS_SKIP_ASSET_DOWNLOAD_PROMPT"] = "1"
    if sys.argv[1] == "batch":
        serve(create_batch, BatchServer)
    else:
        serve(ManiSkillSimulator)
