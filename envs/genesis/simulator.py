"""Simulator process of Genesis: a batch of environments of one scene, on the CPU or a GPU."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import torch

from rlinf_vla.config.errors import UserError

from ..batch_serving import BatchServer
from ..serving import serve
from .batch import SceneBatch, scene_and_views
from .world import World

SMALLEST_BATCH = 2
"""The environment is the last dimension of Genesis' tensors. With a single one the other dimensions
lie contiguous in memory, for which the same kernels give other last bits; all sizes from two on
agree. A single environment is therefore simulated beside one that nobody uses."""


class GenesisBatch(SceneBatch):
    """``options``: JSON values made by ``plugin.simulator_options``."""

    def __init__(self, options: dict[str, Any], num_envs: int, backend: str) -> None:
        scene, views = scene_and_views(options)
        try:
            world = World(scene, num_envs, backend, views, options["low_poly"])
        except ImportError as error:  # raised by the rendering libraries
            raise UserError(
                f"Genesis cannot render here ({str(error).splitlines()[0]}): apt-get install libegl1 libgl1"
            ) from error
        versions = {name: version(name) for name in ("genesis-world", "torch", "numpy")}
        renderer = (
            os.environ.get("PYOPENGL_PLATFORM") or "egl"
        )  # Genesis sets it if it falls back to OSMesa
        visuals = "low_poly" if options["low_poly"] else "stock"
        super().__init__(
            options,
            scene,
            world,
            versions | {"physics": backend, "renderer": renderer, "robot_visuals": visuals},
        )


def create(options: dict[str, Any], slots: int) -> GenesisBatch:
    """Make a batch of at least ``slots`` environments and warm it up."""
    torch.set_num_threads(1)
    batch = GenesisBatch(options, max(slots, SMALLEST_BATCH), options["backend"])
    for _ in range(2):
        batch.warm_up()
    return batch


def compile_kernels() -> None:
    """Compile and save the kernels of the job on standard input (JSON)."""
    import genesis

    job = json.load(sys.stdin)
    create(job["options"], job["num_envs"]).close()
    genesis.destroy()  # writes the kernels


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_kernels()
    else:
        with (
            torch.inference_mode()
        ):  # a control step is a hundred small operations, each a fifth cheaper without autograd
            serve(create, BatchServer)
