"""Simulator process of Newton: a batch of environments of one scene, each with its own MuJoCo."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from ..batch_serving import BatchServer
from ..genesis.batch import SceneBatch, scene_and_views
from ..serving import serve
from .world import World


def create(options: dict[str, Any], slots: int) -> SceneBatch:
    """Make a batch of ``slots`` environments and warm it up."""
    torch.set_num_threads(1)
    scene, views = scene_and_views(options)
    stack = {name: version(name) for name in ("newton", "warp-lang", "mujoco", "torch", "numpy")}
    batch = SceneBatch(
        options,
        scene,
        World(scene, slots, views),
        stack | {"physics": "MuJoCo on the CPU", "renderer": "Newton's ray tracer"},
    )
    batch.warm_up()
    return batch


if __name__ == "__main__":
    with torch.inference_mode():
        serve(create, BatchServer)
