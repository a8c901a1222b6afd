"""Implement the Newton plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import Diagnosis, Suite, Task

from ..genesis.loading import read_scene
from ..genesis.plugin import FOLDER, SCENES
from ..genesis.scene import Scene, why_no_expert
from ..options import one_each, one_of, processes_per_group, refuse_several
from .config import NewtonConfig

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import VectorEnv

INSTALL = "pip install 'rlinf-vla[newton]'"
START_TIMEOUT_S = 1800.0
"""Warp compiles its kernels in the first process: minutes on a busy machine, once."""


class Newton:
    """Implements ``EnvPlugin``."""

    name = "newton"
    Config = NewtonConfig

    def create(self, config: NewtonConfig, groups: int) -> list[VectorEnv]:
        from ..vector_env import environments

        refuse_several(config.tasks)
        scene, options = simulator_options(config)
        processes = processes_per_group(config, groups, batches=True)
        if find_spec("newton") is None:
            raise UserError(f"Newton is not installed: {INSTALL}")
        return environments(
            config,
            groups,
            ["-m", "rlinf_vla.envs.newton.simulator"],
            options,
            processes,
            tasks=(scene.name,),
            no_expert=why_no_expert(scene),
            episode_limit=scene.episode_limit if config.episode_limit is None else config.episode_limit,
            environment={},
            start_timeout=START_TIMEOUT_S,
        )

    def suites(self, config: NewtonConfig) -> list[Suite]:
        return [Suite(self.name, (simulator_options(each)[0].name,), each) for each in one_each(config)]

    def tasks(self) -> list[Task]:
        scenes = {name: read_scene(FOLDER / f"{file}.yaml")[0] for name, file in SCENES.items()}
        return [Task(name, scene.told(0), True, why_no_expert(scene) is None) for name, scene in scenes.items()]

    def diagnose(self) -> list[Diagnosis]:
        if find_spec("newton") is None:
            return [Diagnosis("Newton", False, "optional: not installed", INSTALL)]
        return [Diagnosis("Newton", True, f"newton {version('newton')} with MuJoCo {version('mujoco')}")]


def simulator_options(config: NewtonConfig) -> tuple[Scene, dict[str, Any]]:
    """The scene, and the options of a simulator, JSON values only.

    Raises UserError for options that the user can fix.
    """
    one_of(config.task, SCENES, "env.task")
    path = FOLDER / f"{SCENES[config.task]}.yaml"
    scene, document = read_scene(path)
    cameras = list(scene.cameras) if config.cameras is None else list(config.cameras)
    for name in cameras:
        one_of(name, scene.cameras, f"env.cameras: {name}")
    return replace(scene, name=config.task), {
        "scene": document,
        "path": str(path),
        "rotations": config.control_mode == "ee_delta_pose",
        "image_size": config.image_size,
        "cameras": cameras,
        "reward": config.reward,
    }


plugin = Newton()
