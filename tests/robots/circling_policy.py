"""A policy for ``rlinf-vla serve`` that moves the tool in a circle, as an installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf_vla.core.protocols import Noise, PolicySpec
from rlinf_vla.core.types import ActionSample, Inputs, Observation
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

ENTRY_POINTS = """[rlinf_vla.models]
circling = tests.robots.circling_policy:CirclingPolicy
"""
CENTRE = (0.47, 0.0)
TURN = 0.3
"""Metres, in the base frame: near a Franka's rest position. Radians per action."""
RADIUS_M, METRE = 0.05, 50.0
"""METRE: of the simulated cell, in full actions."""


class CirclingPolicy(LinearPolicy):
    """Chunks of 8 actions: along the circle through the tool, and back to a radius of RADIUS_M."""

    name: ClassVar[str] = "circling"

    def __init__(self, options: LinearOptions) -> None:
        super().__init__(options)
        self.spec = PolicySpec(chunk=8, action_dim=4, state_dim=8, images={"front": (64, 64)})

    def prepare(self, obs: Observation) -> Inputs:
        return {"state": obs.state}

    def encode(self, inputs: Inputs) -> Tensor:
        return inputs["state"]

    def value(self, features: Tensor) -> Tensor:
        return torch.zeros(len(features))

    def act(self, features: Tensor, noise: Noise | None, temperature: float) -> ActionSample:
        away = features[:, :2] - torch.tensor(CENTRE)
        angles = torch.atan2(away[:, 1], away[:, 0])[:, None] + TURN * torch.arange(
            self.spec.chunk + 1
        )
        radii = torch.linspace(0, 1, self.spec.chunk + 1) * (
            RADIUS_M - away.norm(dim=1, keepdim=True)
        ) + away.norm(dim=1, keepdim=True)
        path = torch.stack([radii * angles.cos(), radii * angles.sin()], -1)
        actions = torch.zeros(len(features), self.spec.chunk, 4)
        actions[..., :2] = (METRE * path.diff(dim=1)).clamp(-0.9, 0.9)
        actions[..., 3] = 1.0
        return ActionSample(actions, {}, torch.zeros_like(actions), torch.zeros(len(features)))


def announce(folder: Path) -> None:
    """Writes such a package into ``folder``, which must be on PYTHONPATH."""
    package: Any = folder / "circling-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: circling\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
