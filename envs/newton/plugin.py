"""Implement the Newton plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_vla.core.tasks import Diagnosis, Suite, Task

from ..genesis.plugin import episode_limit, packaged_tasks, scene_options, scene_spec
from ..genesis.scene import why_no_expert
from ..options import Package, one_each, processes_per_group, refuse_several
from .config import NewtonConfig

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import EnvSpec, VectorEnv

PACKAGE = Package("Newton", "newton", "pip install 'rlinf-vla[newton]'")
START_TIMEOUT_S = 1800.0
"""Warp compiles its kernels in the first process: minutes on a busy machine, once."""


class Newton:
    """Implements ``EnvPlugin``."""

    name = "newton"
    Config = NewtonConfig

    def create(self, config: NewtonConfig, groups: int) -> list[VectorEnv]:
        from ..vector_env import environments

        refuse_several(config.tasks)
        scene, options = scene_options(config)
        processes = processes_per_group(config, groups, batches=True)
        PACKAGE.require()
        return environments(
            config,
            groups,
            ["-m", "rlinf_vla.envs.newton.simulator"],
            options,
            processes,
            tasks=(scene.name,),
            no_expert=why_no_expert(scene),
            episode_limit=episode_limit(config, scene),
            environment={},
            start_timeout=START_TIMEOUT_S,
        )

    def outline(self, config: NewtonConfig) -> EnvSpec:
        refuse_several(config.tasks)
        return scene_spec(config, *scene_options(config))

    def suites(self, config: NewtonConfig) -> list[Suite]:
        return [
            Suite(self.name, (scene_options(suite_config)[0].name,), suite_config)
            for suite_config in one_each(config)
        ]

    def tasks(self) -> list[Task]:
        return packaged_tasks()

    def diagnose(self) -> list[Diagnosis]:
        return [PACKAGE.diagnosis("newton", "mujoco")]


plugin = Newton()
