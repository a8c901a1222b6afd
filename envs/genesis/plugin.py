"""Implement the Genesis plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Diagnosis, Suite, Task, VectorEnv

from ..batched import Batch, on_gpu, use_gpu, why_not_on_gpu
from ..options import batches_per_group, one_each, one_of, refuse_several
from ..processes import SimulatorPool
from ..vector_env import environments
from .config import GenesisConfig
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
        processes = batches_per_group(config.num_envs, config.processes, groups)
        if find_spec("genesis") is None:
            raise UserError(f"Genesis is not installed: {INSTALL}")
        if gl() is None:
            raise UserError(NO_GL)
        limit, tasks, no_expert = episode_limit(config, scene), (scene.name,), why_no_expert(scene)
        if use_gpu(config.backend, config.num_envs, why_not_on_gpu(groups)):
            return on_gpu(partial(_gpu_batch, options, config.num_envs), limit, tasks, no_expert)
        folder, per_group = cache_dir(config.cache_dir), config.num_envs // groups
        compile_once(options, per_group // processes, folder)
        pool = partial(
            SimulatorPool,
            ["-m", "rlinf_vla.envs.genesis.simulator"],
            options,
            slots=per_group,
            processes=processes,
            episode_limit=limit,
            environment=environment(folder),
            step_timeout=config.step_timeout_s,
            start_timeout=START_TIMEOUT_S,
        )
        return environments(groups, pool, tasks, no_expert)

    def suites(self, config: GenesisConfig) -> list[Suite]:
        if config.tasks and config.scene is not None:
            raise UserError("env.tasks and env.scene cannot be played in one sweep: give one of them")
        alone = one_each(config)
        return [Suite(self.name, (simulator_options(each)[0].name,), each) for each in alone]

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


def episode_limit(config: GenesisConfig, scene: Scene) -> int:
    return scene.episode_limit if config.episode_limit is None else config.episode_limit


def _gpu_batch(options: dict[str, Any], num_envs: int) -> Batch:
    from .batch import GenesisBatch  # imports Genesis only when it is constructed

    return GenesisBatch(options, num_envs, "gpu")


plugin = Genesis()
