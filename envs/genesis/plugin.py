"""Implement the Genesis plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Baseline, Diagnosis, Suite, Task, VectorEnv

from ..batched import BatchedVectorEnv, use_gpu, why_not_on_gpu
from ..options import divide, one_each, one_of, refuse_several
from ..processes import SimulatorPool
from ..serving import SimulatorUnavailable
from ..vector_env import environments
from .config import VISUALS, GenesisConfig
from .doctor import INSTALL, NO_GL, checks, gl
from .experts import why_no_expert
from .kernels import cache_dir, compile_once, environment
from .loading import read_scene
from .scene import Scene

START_TIMEOUT_S = 900.0
"""Loading cached kernels takes 10 to 30 s; recompiling after a change missed by the hash, 120 s."""
SCENES = {"PickCube": "pick_cube", "PutOnPlate": "put_on_plate"}
FOLDER = Path(__file__).with_name("scenes")


class Genesis:
    """Implements ``EnvPlugin``."""

    name = "genesis"
    Config = GenesisConfig

    def create(self, config: GenesisConfig, groups: int) -> list[VectorEnv]:
        refuse_several(config.tasks)
        scene, options = simulator_options(config)
        per_group = divide(config.num_envs, groups, "env.num_envs")
        processes = 1 if config.processes is None else divide(config.processes, groups, "env.processes")
        divide(per_group, processes, "the environments of a group, env.num_envs / groups")
        if find_spec("genesis") is None:
            raise UserError(f"Genesis is not installed: {INSTALL}")
        if gl() is None:
            raise UserError(NO_GL)
        limit = scene.episode_limit if config.episode_limit is None else config.episode_limit
        refusal = why_not_on_gpu(groups)
        if use_gpu(config.backend, config.num_envs, refusal):
            return [_on_gpu(options, config.num_envs, limit, scene)]
        folder = cache_dir(config.cache_dir)
        compile_once(options, per_group // processes, folder)
        pools = [
            SimulatorPool(
                ["-m", "rlinf_vla.envs.genesis.simulator"],
                options,
                slots=per_group,
                processes=processes,
                episode_limit=limit,
                environment=environment(folder),
                step_timeout=config.step_timeout_s,
                start_timeout=START_TIMEOUT_S,
            )
            for _ in range(groups)
        ]
        return environments(pools, (scene.name,), why_no_expert(scene))

    def suites(self, config: GenesisConfig) -> list[Suite]:
        if config.tasks and config.scene is not None:
            raise UserError("env.tasks and env.scene cannot be played in one sweep: give one of them")
        alone = one_each(config)
        return [Suite(self.name, (simulator_options(each)[0].name,), each) for each in alone]

    def baselines(self, config: GenesisConfig, episodes: int) -> list[Baseline]:
        """Genesis' own loop on the same scene, random joint targets, with and without images."""
        scene, options = simulator_options(config)
        folder = cache_dir(config.cache_dir)
        compile_once(options, config.num_envs, folder)
        limit = scene.episode_limit if config.episode_limit is None else config.episode_limit
        work = {"options": options, "num_envs": config.num_envs, "episode_limit": limit, "episodes": episodes}
        program = "-m", "rlinf_vla.envs.genesis.stock"
        return [
            Baseline(name, images, (*program, json.dumps(work | {"images": images})), environment(folder))
            for name, images in (("scene.step, camera.render", True), ("scene.step", False))
            if options["cameras"] or not images
        ]

    def variants(self, config: GenesisConfig) -> dict[str, GenesisConfig]:
        return {
            f"{visuals} robot, {size} x {size}": replace(config, robot_visuals=visuals, image_size=size, backend="cpu")
            for visuals in VISUALS
            for size in (64, 224)
        }

    def tasks(self) -> list[Task]:
        scenes = {name: read_scene(FOLDER / f"{file}.yaml")[0] for name, file in SCENES.items()}
        return [Task(name, scene.told(0), True, why_no_expert(scene) is None) for name, scene in scenes.items()]

    def diagnose(self) -> list[Diagnosis]:
        return list(checks())


def simulator_options(config: GenesisConfig) -> tuple[Scene, dict[str, Any]]:
    """The scene, and the options of a simulator, JSON values only.

    Raises UserError for options that the user can fix.
    """
    one_of(config.task, SCENES, "env.task")
    path = Path(config.scene).expanduser().absolute() if config.scene else FOLDER / f"{SCENES[config.task]}.yaml"
    scene, document = read_scene(path)
    if not config.scene:
        scene = replace(scene, name=config.task)
    cameras = list(scene.cameras) if config.cameras is None else list(config.cameras)
    for name in cameras:
        one_of(name, scene.cameras, f"env.cameras: {name}")
    return scene, {
        "scene": document,
        "path": str(path),
        "rotations": config.control_mode == "ee_delta_pose",
        "image_size": config.image_size,
        "cameras": cameras,
        "low_poly": config.robot_visuals == "low_poly",
        "reward": config.reward,
    }


def _on_gpu(options: dict[str, Any], num_envs: int, limit: int, scene: Scene) -> VectorEnv:
    from .batch import GenesisBatch  # imports Genesis only when it is constructed

    try:
        return BatchedVectorEnv(GenesisBatch(options, num_envs, "gpu"), limit, (scene.name,), why_no_expert(scene))
    except SimulatorUnavailable as error:
        raise UserError(str(error)) from error
