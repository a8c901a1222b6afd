"""End a command whose GPU is full in one line: the keys to set (docs/guides/out_of_memory.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlinf_vla.config.checks import may_offload
from rlinf_vla.config.cluster import IN_PROCESS
from rlinf_vla.config.errors import Failure
from rlinf_vla.config.recipe import OFF_POLICY, Recipe

SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "NPU out of memory",
)
"""Parts of the messages of accelerators' libraries, whose errors are RuntimeErrors."""


@contextmanager
def explained(recipe: Recipe, trains: bool) -> Iterator[None]:
    """Raise Failure in place of an error that says that a GPU's memory is full.

    ``trains``: the context trains the policy; otherwise it only acts.
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        full = isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in SIGNS)
        if isinstance(error, Failure) or not full:
            raise
        keys = ", ".join(remedies(recipe, trains)) or "use a GPU with more memory"
        again = ", and continue with resume=auto" if trains else ""
        raise Failure(
            f"a GPU has too little memory ({text[:160]}): try in this order {keys}{again} "
            "(docs/guides/out_of_memory.md)"
        ) from error


def remedies(recipe: Recipe, trains: bool) -> list[str]:
    """Return keys that save memory and are not set yet, as KEY=VALUE; what keeps the result first.

    ``trains``: see ``explained``.
    """
    cluster = recipe.cluster
    rollout_rows = recipe.rollout.batch_size
    off_policy = recipe.algorithm.family == OFF_POLICY
    keys = []
    if trains and not off_policy and cluster.rows > 1:
        keys.append(f"cluster.micro_batch_size={cluster.rows // 2}")
    if trains and not cluster.gradient_checkpointing:
        keys.append("cluster.gradient_checkpointing=true")
    if rollout_rows > 1:
        keys.append(f"rollout.batch_size={rollout_rows // 2}")
    if trains and cluster.runtime != IN_PROCESS and not cluster.offload and may_offload(recipe):
        keys.append("cluster.offload=true")
    if trains and cluster.trainer_ranks > 1 and cluster.trainer_sharding == "none":
        keys.append("cluster.trainer_sharding=full")
    if cluster.cuda_graphs:
        keys.append("cluster.cuda_graphs=false")
    if getattr(recipe.model.options, "dtype", None) == "float32":
        keys.append("model.options.dtype=bfloat16")
    if trains and off_policy and recipe.algorithm.batch_size > 1:
        keys.append(f"algorithm.batch_size={recipe.algorithm.batch_size // 2}")
    if trains and not recipe.model.lora.rank and recipe.model.lora.adapter is None:
        keys.append("model.lora.rank=32")
    return keys
