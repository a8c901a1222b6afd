"""Baseline of ``rlinf-vla bench env``: Genesis' own loop on the same scene and batch.

Sends joint targets and calls ``scene.step``; with images, also ``camera.render`` for all
environments at every control step, with the robot's visual meshes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.benchmarks.simulators import Baseline, visual_variants
from rlinf_vla.benchmarks.simulators.timed import timed
from rlinf_vla.envs.genesis.config import VISUALS, GenesisConfig
from rlinf_vla.envs.genesis.kernels import cache_dir, compile_once, environment
from rlinf_vla.envs.genesis.loading import scene_from
from rlinf_vla.envs.genesis.plugin import episode_limit, simulator_options
from rlinf_vla.envs.genesis.world import (
    ARM,
    POSTURE_RAD,
    SUBSTEPS,
    add_camera,
    assemble,
    build,
    start,
)


def variants(config: GenesisConfig) -> dict[str, GenesisConfig]:
    return visual_variants(config, VISUALS)


def baselines(config: GenesisConfig, episodes: int) -> list[Baseline]:
    """The same scene with random joint targets, with and without images."""
    scene, options = simulator_options(config)
    folder = cache_dir(config.cache_dir)
    compile_once(options, config.num_envs, folder)
    work = {
        "options": options,
        "num_envs": config.num_envs,
        "episode_limit": episode_limit(config, scene),
        "episodes": episodes,
    }
    return [
        Baseline(
            name,
            images,
            ("-m", __name__, json.dumps(work | {"images": images})),
            environment(folder),
        )
        for name, images in (("scene.step, camera.render", True), ("scene.step", False))
        if options["cameras"] or not images
    ]


def main(work: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    options, count = work["options"], work["num_envs"]
    scene = scene_from(options["scene"], Path(options["path"]))
    simulation, robot, _ = assemble(
        start("cpu"), scene, low_poly=False, substeps=1, split_envs=True
    )
    seen = options["cameras"] if work["images"] else []
    cameras = [
        add_camera(simulation, scene.cameras[name], (options["image_size"],) * 2) for name in seen
    ]
    build(simulation, robot, count)
    posture = torch.tensor(POSTURE_RAD).expand(count, 9)
    generator = torch.Generator().manual_seed(0)

    def play(_: int) -> None:
        simulation.reset()
        robot.set_qpos(posture)
        for _ in range(work["episode_limit"]):
            targets = posture.clone()
            targets[:, ARM] += 0.1 * torch.randn(count, 7, generator=generator)
            robot.control_dofs_position(targets)
            for _ in range(SUBSTEPS):
                simulation.step(update_visualizer=False)
            for camera in cameras:
                camera.render(force_render=True)

    timed(play, work["episodes"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
