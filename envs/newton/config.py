"""Define the ``env`` node of a recipe that runs Newton."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_vla.config.ranges import EnvCount, Name

from ..genesis.config import SceneConfig


@dataclass
class NewtonConfig(SceneConfig):
    """Newton, with MuJoCo as its solver."""

    name: Name = "newton"
    num_envs: EnvCount = 8
