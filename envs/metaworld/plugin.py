"""Implement the Meta-World plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf_vla.core import bootstrap
from rlinf_vla.core.tasks import Diagnosis, Task

from .. import mujoco_gl
from ..options import Package, existing_python, one_of, processes_per_group
from .config import CAMERAS, MOUNTED, OFFICIAL_LIMIT, MetaWorldConfig
from .tasks import INSTRUCTIONS, selected

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import EnvSpec, VectorEnv

PACKAGE = Package(
    "Meta-World",
    "metaworld",
    "pip install metaworld, or in an environment of its own for env.python (docs/metaworld.md)",
)


class MetaWorld:
    """Implements ``EnvPlugin``."""

    name = "metaworld"
    Config = MetaWorldConfig

    def create(self, config: MetaWorldConfig, groups: int) -> list[VectorEnv]:
        from ..vector_env import environments

        options = simulator_options(config)
        processes = processes_per_group(config, groups, batches=False)
        if config.python is None:
            PACKAGE.require()
        renderer = mujoco_gl.find(
            config.renderer, config.python, bool(config.cameras), groups * processes
        )
        return environments(
            config,
            groups,
            [str(bootstrap.__file__), "envs.metaworld.simulator"],
            options | {"renderer": f"{renderer.backend}: {renderer.name}"},
            processes,
            tasks=tuple(options["tasks"]),
            no_expert=None,
            episode_limit=episode_limit(config),
            environment=renderer.environment(),
            python=config.python,
        )

    def gpu_bytes(self, config: MetaWorldConfig, environments: int, processes: int) -> float:
        return mujoco_gl.gpu_bytes(config.renderer, processes * bool(config.cameras), 0.0)

    def outline(self, config: MetaWorldConfig) -> EnvSpec:
        from ..checks import spec_of
        from .outline import outline

        options = simulator_options(replace(config, python=None))  # it may be on another machine
        return spec_of(
            outline(options), config.num_envs, episode_limit(config), tuple(options["tasks"])
        )

    def tasks(self) -> list[Task]:
        return [Task(name, instruction, True, True) for name, instruction in INSTRUCTIONS.items()]

    def diagnose(self) -> list[Diagnosis]:
        return [PACKAGE.diagnosis("metaworld", "mujoco")]


def episode_limit(config: MetaWorldConfig) -> int:
    """Control steps of an episode."""
    return (
        -(-OFFICIAL_LIMIT // config.action_repeat)
        if config.episode_limit is None
        else config.episode_limit
    )


def simulator_options(config: MetaWorldConfig) -> dict[str, Any]:
    """Options of a simulator, JSON values only. Raises UserError for what the user can fix."""
    existing_python(config.python)
    for name in config.cameras:
        one_of(name, [*CAMERAS, *MOUNTED], "env.cameras")
    common = config.convention == "common"
    return {
        "tasks": selected(config.tasks, config.instructions),
        "state": config.state or ("tool" if common else "hand"),
        "cameras": {name: CAMERAS.get(name, name) for name in config.cameras},
        **{
            name: getattr(config, name)
            for name in (
                "convention",
                "image_size",
                "rendering",
                "reward",
                "action_repeat",
                "scenes",
            )
        },
    }


plugin = MetaWorld()
