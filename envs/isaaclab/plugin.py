"""Implement the Isaac Lab plug-in: make vector environments from a recipe's ``env`` node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import bootstrap
from rlinf_vla.core.tasks import Diagnosis, Task

from ..options import Package, divide, existing_python
from .config import CAMERAS, IsaacLabConfig

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import VectorEnv

PACKAGE = Package(
    "Isaac Lab",
    "isaaclab",
    "pip install isaaclab in an environment of its own, and name it in env.python (docs/isaaclab.md)",
)
START_TIMEOUT_S = 1800.0  # the first start downloads the task's assets and compiles shaders
STACK = "put the red cube on the blue cube, and the green cube on the red cube"
INSTRUCTIONS = {
    "Isaac-Lift-Cube-Franka-IK-Rel": "lift the cube to the goal",
    "Isaac-Stack-Cube-Franka-IK-Rel": STACK,
    "Isaac-Stack-Cube-Franka-IK-Rel-Visuomotor": STACK,
}
"""Task without its version -> sentence in our words: Isaac Lab's tasks have none."""


class IsaacLab:
    """Implements ``EnvPlugin``."""

    name = "isaaclab"
    Config = IsaacLabConfig

    def create(self, config: IsaacLabConfig, groups: int) -> list[VectorEnv]:
        from ..vector_env import environments

        options = simulator_options(config)
        divide(config.num_envs, groups, "env.num_envs")
        if config.python is None:
            PACKAGE.require()
        return environments(
            config,
            groups,
            [str(bootstrap.__file__), "envs.isaaclab.simulator"],
            options,
            1,
            tasks=(config.task,),
            no_expert="env=isaaclab has no scripted expert",
            episode_limit=config.episode_limit,
            python=config.python,
            start_timeout=START_TIMEOUT_S,
        )

    def tasks(self) -> list[Task]:
        return [
            Task(f"{name}-v0", instruction, True, False)
            for name, instruction in INSTRUCTIONS.items()
        ]

    def diagnose(self) -> list[Diagnosis]:
        return [PACKAGE.diagnosis("isaaclab")]


def simulator_options(config: IsaacLabConfig) -> dict[str, Any]:
    """Options of a simulator, JSON values only. Raises UserError for what the user can fix."""
    existing_python(config.python)
    instruction = config.instruction or INSTRUCTIONS.get(config.task.removesuffix("-v0"))
    if instruction is None:
        raise UserError(
            f"env.task={config.task} has no instruction here: set env.instruction to what the policy is told"
        )
    if config.reward == "sparse" and config.success is None:
        raise UserError("env.reward=sparse needs success: set env.success, or env.reward=dense")
    return {
        "instruction": instruction,
        "cameras": {name: CAMERAS.get(name, name) for name in config.cameras},
        "units": [config.translation_m, config.rotation_rad],
        **{
            name: getattr(config, name)
            for name in ("task", "module", "success", "state", "image_size", "reward", "device")
        },
    }


plugin = IsaacLab()
