"""Simulator process of Genesis: one batch of environments on the CPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ..batch_serving import BatchServer
from ..serving import serve
from .batch import GenesisBatch


def create(options: dict[str, Any], slots: int) -> GenesisBatch:
    """Make a batch and warm it up, so that no later command waits for a kernel to load."""
    torch.set_num_threads(1)
    batch = GenesisBatch(options, slots, "cpu")
    rows = list(range(slots))
    for _ in range(2):
        batch.reset(rows, rows)
        batch.step(batch.expert())
        batch.observe(rows[:1])
        batch.render(0)
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
        with torch.inference_mode():  # a control step is a hundred small operations, each a fifth cheaper without autograd
            serve(create, BatchServer)
