"""Implement the Genesis plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import Diagnosis, Suite, Task

from ..options import Package, one_each, one_of, processes_per_group, refuse_several
from .config import GenesisConfig
from .kernels import cache_dir, compile_once, environment
from .loading import read_scene
from .scene import Scene, why_no_expert

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import EnvSpec, VectorEnv

PACKAGE = Package("Genesis", "genesis", "pip install 'rlinf-vla[genesis]'")
NO_GL = "Genesis renders with OpenGL (EGL or OSMesa), which is missing: apt-get install libegl1 libgl1 libgl1-mesa-dri"
START_TIMEOUT_S = 900.0
"""Loading cached kernels takes 10 to 30 s; recompiling after a change missed by the hash, 120 s."""
SCENES = {"PickCube": "pick_cube", "PutOnPlate": "put_on_plate"}
FOLDER = Path(__file__).with_name("scenes")


class Genesis:
    """Implements ``EnvPlugin``."""

    name = "genesis"
    Config = GenesisConfig

    def create(self, config: GenesisConfig, groups: int) -> list[VectorEnv]:
        from ..batched import current_gpu
        from ..vector_env import environments

        refuse_several(config.tasks)
        scene, options = simulator_options(config)
        processes = processes_per_group(config, groups, batches=True)
        PACKAGE.require()
        if gl() is None:
            raise UserError(NO_GL)
        limit = episode_limit(config, scene)
        tasks = (scene.name,)
        no_expert = why_no_expert(scene)
        device = None
        variables = dict[str, str]()
        if self.backend(config) == "gpu":
            options["backend"] = "gpu"
            device, variables = current_gpu()
            processes = 1
        folder = cache_dir(config.cache_dir)
        compile_once(options, config.num_envs // groups // processes, folder)
        return environments(
            config,
            groups,
            ["-m", "rlinf_vla.envs.genesis.simulator"],
            options,
            processes,
            tasks=tasks,
            no_expert=no_expert,
            episode_limit=limit,
            environment=environment(folder) | variables,
            device=device,
            start_timeout=START_TIMEOUT_S,
        )

    def backend(self, config: GenesisConfig, here: bool = True) -> str:
        from .. import batched

        return batched.choose(
            config.backend, config.num_envs, batched.why_not_on_gpu() if here else None
        )

    def gpu_bytes(self, config: GenesisConfig, environments: int, processes: int) -> float:
        from .. import batched
        from ..mujoco_gl import CONTEXT

        if self.backend(config, here=False) == "cpu":
            return processes * CONTEXT
        pixels = len(scene_options(config, config.scene)[1]["cameras"]) * config.image_size**2
        return batched.gpu_bytes(environments, pixels)

    def outline(self, config: GenesisConfig) -> EnvSpec:
        refuse_several(config.tasks)
        return scene_spec(config, *simulator_options(config))

    def suites(self, config: GenesisConfig) -> list[Suite]:
        if config.tasks and config.scene is not None:
            raise UserError(
                "env.tasks and env.scene cannot be played in one sweep: give one of them"
            )
        alone = one_each(config)
        return [
            Suite(self.name, (simulator_options(suite_config)[0].name,), suite_config)
            for suite_config in alone
        ]

    def tasks(self) -> list[Task]:
        return packaged_tasks()

    def diagnose(self) -> list[Diagnosis]:
        return list(checks())


def simulator_options(config: GenesisConfig) -> tuple[Scene, dict[str, Any]]:
    """The scene, and the options of a simulator, JSON values only.

    Raises UserError for options that the user can fix.
    """
    scene, options = scene_options(config, config.scene)
    return scene, options | {"backend": "cpu", "low_poly": config.robot_visuals == "low_poly"}


def scene_options(config: Any, own: str | None = None) -> tuple[Scene, dict[str, Any]]:
    """The scene of the task, or of the file ``own``, and what ``batch.SceneBatch`` reads.

    ``config``: of a simulator that plays these scenes. Raises UserError for options that the user
    can fix.
    """
    one_of(config.task, SCENES, "env.task")
    path = Path(own).expanduser().absolute() if own else FOLDER / f"{SCENES[config.task]}.yaml"
    scene, document = read_scene(path)
    if not own:
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
        "reward": config.reward,
    }


def scene_spec(config: Any, scene: Scene, options: dict[str, Any]) -> EnvSpec:
    """Return what is known of the environments of a scene before they start."""
    from ..checks import spec_of
    from .batch import outline

    return spec_of(outline(options), config.num_envs, episode_limit(config, scene), (scene.name,))


def packaged_tasks() -> list[Task]:
    scenes = {name: read_scene(FOLDER / f"{file}.yaml")[0] for name, file in SCENES.items()}
    return [
        Task(name, scene.told(0), True, why_no_expert(scene) is None)
        for name, scene in scenes.items()
    ]


def episode_limit(config: Any, scene: Scene) -> int:
    return scene.episode_limit if config.episode_limit is None else config.episode_limit


def gl() -> str | None:
    """Name of the OpenGL library that Genesis renders with; None if there is none."""
    return next((name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)), None)


def checks() -> Iterator[Diagnosis]:
    yield PACKAGE.diagnosis("genesis-world")
    if PACKAGE.missing():
        return
    yield Diagnosis(
        "Genesis drawing", gl() is not None, gl() or "optional: neither EGL nor OSMesa", NO_GL
    )
    folder = cache_dir(None)
    compiled = len(list(folder.glob("compiled-*")))
    writable = os.access(
        next(parent for parent in (folder, *folder.parents) if parent.exists()), os.W_OK
    )
    detail = (
        f"{compiled} kinds of scene compiled in {folder}"
        if writable
        else f"optional: {folder} cannot be written"
    )
    yield Diagnosis(
        "Genesis kernels", writable, detail, "set env.cache_dir to a folder of your own"
    )


plugin = Genesis()
