"""Baseline of ``rlinf-vla bench env``: gymnasium's AsyncVectorEnv, as ManiSkill documents for CPUs.

One process per environment, each with the robot's visual meshes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from rlinf_vla.benchmarks.simulators import Baseline, visual_variants
from rlinf_vla.benchmarks.simulators.timed import timed
from rlinf_vla.envs.maniskill.config import VISUALS, ManiSkillConfig


def variants(config: ManiSkillConfig) -> dict[str, ManiSkillConfig]:
    return visual_variants(config, VISUALS)


def baselines(config: ManiSkillConfig, episodes: int) -> list[Baseline]:
    from rlinf_vla.envs.maniskill.plugin import (
        cpu_driver,
        episode_limit,
        simulator_options,
    )  # the program needs none of it

    backend, environment = cpu_driver(config)
    options = simulator_options(config) | {"render_backend": backend}
    work = {
        "options": options,
        "num_envs": config.num_envs,
        "episode_limit": episode_limit(config),
        "episodes": episodes,
    }
    return [
        Baseline(name, images, ("-m", __name__, json.dumps(work | {"images": images})), environment)
        for name, images in (("AsyncVectorEnv, rgb", True), ("AsyncVectorEnv, state", False))
    ]


def main(work: dict[str, Any]) -> None:
    import gymnasium

    # not fork: AsyncVectorEnv has made an environment here; its Vulkan threads would be lost
    envs = gymnasium.vector.AsyncVectorEnv([lambda: make(work)] * work["num_envs"], context="spawn")
    generator = np.random.default_rng(0)

    def play(episode: int) -> None:
        envs.reset(seed=[episode * work["num_envs"] + row for row in range(work["num_envs"])])
        for _ in range(work["episode_limit"]):
            envs.step(generator.uniform(-1, 1, envs.action_space.shape).astype(np.float32))

    try:
        timed(play, work["episodes"])
    finally:
        envs.close()


def make(work: dict[str, Any]) -> Any:
    """Make one environment with the observations that ManiSkill makes at every step."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    import torch
    from mani_skill.utils.wrappers import CPUGymWrapper

    from rlinf_vla.envs.maniskill import put_on_plate  # noqa: F401  (registers the task)

    torch.set_num_threads(1)
    options = work["options"]
    size = {"width": options["image_size"], "height": options["image_size"]}
    env = gymnasium.make(
        options["gym_id"],
        obs_mode="rgb" if work["images"] else "state",
        control_mode=options["control_mode"],
        reward_mode="sparse",
        sim_backend="physx_cpu",
        render_backend=options["render_backend"],
        sensor_configs=size,
        max_episode_steps=work["episode_limit"],
        **({"robot_uids": options["robot"]} if options["robot"] else {}),
    )
    return CPUGymWrapper(env, ignore_terminations=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
