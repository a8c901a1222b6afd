"""Implement the gymnasium plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.tasks import Diagnosis, Task

from ..options import Package, processes_per_group
from .config import GymnasiumConfig

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import VectorEnv

PACKAGE = Package("gymnasium", "gymnasium", "pip install gymnasium")


class Gymnasium:
    """Implements ``EnvPlugin``."""

    name = "gymnasium"
    Config = GymnasiumConfig

    def create(self, config: GymnasiumConfig, groups: int) -> list[VectorEnv]:
        from ..vector_env import environments

        options = simulator_options(config)
        processes = processes_per_group(config, groups, batches=True)
        PACKAGE.require()
        return environments(
            config,
            groups,
            ["-m", "rlinf_vla.envs.gymnasium.simulator"],
            options,
            processes,
            tasks=(config.id,),
            no_expert="env=gymnasium has no scripted expert",
            episode_limit=config.episode_limit,
        )

    def tasks(self) -> list[Task]:
        return []

    def diagnose(self) -> list[Diagnosis]:
        return [PACKAGE.diagnosis("gymnasium")]


def simulator_options(config: GymnasiumConfig) -> dict[str, Any]:
    """Options of a simulator, JSON values only. Raises UserError for an empty instruction."""
    if not config.instruction.strip():
        raise UserError("env.instruction is empty: set it to the task of the policy")
    return asdict(config)


plugin = Gymnasium()
