"""The simulator process: single ManiSkill environments on the CPU."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..serving import Seen, SimulatorSpec, Step, Unusable, serve

PICTURE_SIZE = 256
"""Height and width of the picture for people."""


def make(options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> Any:
    """One ManiSkill base environment (batched where ``num_envs`` is more than one) that renders only when asked."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    from mani_skill.utils import sapien_utils

    from . import put_on_plate  # noqa: F401  (registers the task)

    size = options["image_size"]
    camera: dict[str, Any] = {"width": size, "height": size, "shader_pack": "minimal"}
    if options["close_view"]:
        eye, target, fov = options["close_view"]
        camera |= {"pose": sapien_utils.look_at(eye, target), "fov": fov}
    keywords: dict[str, Any] = {"robot_uids": options["robot"]} if options["robot"] else {}
    try:
        env = gymnasium.make(
            options["gym_id"],
            num_envs=num_envs,
            obs_mode=options["obs_mode"],
            control_mode=options["control_mode"],
            reward_mode=options["reward"],
            render_mode="rgb_array",
            sim_backend=sim_backend,
            render_backend=render_backend,
            sensor_configs={options["camera"]: camera},
            human_render_camera_configs={"width": PICTURE_SIZE, "height": PICTURE_SIZE},
            max_episode_steps=sys.maxsize,  # the adapter counts control steps itself
            **keywords,
        ).unwrapped
    except RuntimeError as error:
        if any(sign in str(error) for sign in ("ErrorIncompatibleDriver", "supported physical device", "rendering device")):
            raise Unusable("no Vulkan driver that SAPIEN accepts: run `rlinf-vla doctor --fix`") from error
        raise
    # Steps and resets then return no observation: images are taken by take_images alone. (obs_mode_struct still says which ones.)
    env._obs_mode = "none"
    return env


def rotation_signs(env: Any) -> NDArray[np.float32]:
    """``[D]``: what to multiply an action with. ManiSkill's normalised end-effector rotations turn the wrong way round: it scales them by
    the lower limit, -0.1 rad."""
    from mani_skill.agents.controllers import PDEEPoseController

    controller = env.agent.controller
    signs = np.ones(env.single_action_space.shape, np.float32)
    for name, (begin, end) in getattr(controller, "action_mapping", {}).items():
        part = controller.controllers[name]
        if isinstance(part, PDEEPoseController) and part.config.normalize_action:
            signs[begin + 3 : end] = -1
    return signs


def proprioception(env: Any) -> Any:
    """float32 ``[num_envs, 8]``: tool centre point x y z (m, the table's frame), quaternion w x y z, and one finger joint (m; 0 without)."""
    import torch

    pose = env.agent.tcp.pose.raw_pose
    qpos = env.agent.robot.get_qpos()
    has_gripper = bool(getattr(env.agent, "gripper_joint_names", None))
    finger = qpos[:, -1:] if has_gripper else torch.zeros_like(qpos[:, :1])
    return torch.cat([pose, finger], dim=1).float()


class ManiSkillSimulator:
    """Implements ``serving.Simulator``."""

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        import torch

        torch.set_num_threads(1)
        if options["low_poly"]:
            import mani_skill.envs  # noqa: F401

            from .lowpoly import use_low_poly_visuals

            use_low_poly_visuals()
        self._camera, self._instruction = options["camera"], options["instruction"]
        self._envs = [make(options, 1, "physx_cpu", options["render_backend"]) for _ in range(slots)]
        env = self._envs[0]
        self._signs = rotation_signs(env)
        size = [options["image_size"]] * 2
        self.spec = SimulatorSpec(len(self._signs), 8, float(env.control_freq), {"base": size}, [PICTURE_SIZE] * 2)

    def reset(self, slot: int, seed: int, task: int) -> str:
        env = self._envs[slot]
        env.reset(seed=seed)
        if hasattr(env, "get_language_instruction"):
            return str(env.get_language_instruction()[0])
        return str(self._instruction)

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        _, reward, terminated, _, info = self._envs[slot].step((action * self._signs)[None])
        success = info.get("success")
        return Step(float(reward[0]), bool(terminated[0]), bool(success[0]) if success is not None else False)

    def observe(self, slot: int) -> Seen:
        env = self._envs[slot]
        image = env._get_obs_sensor_data()[self._camera]["rgb"][0]
        return Seen(proprioception(env)[0].numpy(), {"base": image.cpu().numpy()})

    def expert(self, slot: int) -> NDArray[np.float32]:
        from .experts import expert_actions

        return expert_actions(self._envs[slot])[0].numpy()

    def render(self, slot: int) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self._envs[slot].render()[0].cpu().numpy()
        return picture


if __name__ == "__main__":
    os.environ["MS_SKIP_ASSET_DOWNLOAD_PROMPT"] = "1"
    serve(ManiSkillSimulator)
