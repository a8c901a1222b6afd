"""Define the interface of a simulator that steps its environments as one batch.

``batch_serving`` serves it in a process of its own, one per group: SAPIEN and Genesis allow one
such batch per process, and while the policy works for one group, the process of another steps.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

from .shared_arrays import SimulatorSpec

WORTH_A_GPU = 64
"""Smallest number of environments for which ``backend=auto`` chooses the GPU."""


def why_not_on_gpu() -> str | None:
    """Return why no batch can be stepped on a GPU; None if one can."""
    if not torch.cuda.is_available():
        return "env.backend=gpu needs a CUDA GPU that PyTorch sees: use env.backend=cpu"
    return None


def current_gpu() -> tuple[torch.device, dict[str, str]]:
    """Return this process's GPU, and the variables for which a process has no other."""
    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", index), {
        "CUDA_VISIBLE_DEVICES": visible.split(",")[index] if visible else str(index)
    }


def choose(backend: str, num_envs: int, refusal: str | None) -> str:
    """Return ``cpu`` or ``gpu`` for a key ``backend``, which may be ``auto``.

    ``refusal``: why the GPU cannot be used, or None. Raises UserError if ``backend`` is ``gpu``
    nevertheless.
    """
    if backend == "gpu" and refusal is not None:
        raise UserError(refusal)
    if backend == "auto":
        return "gpu" if refusal is None and num_envs >= WORTH_A_GPU else "cpu"
    return backend


def gpu_bytes(environments: int, pixels: int) -> float:
    """Return the estimated memory of a batch on its GPU, with ``pixels`` per environment in all.

    Estimated, not measured: contexts of CUDA and Vulkan, scenes, and per pixel the textures of
    colour, position and segmentation, as drawn and as copied for PyTorch. ManiSkill's own figure is
    2.2 GB for 32 environments with pictures of 128 x 128.
    """
    return 2.0e9 + environments * (1.0e6 + 48 * pixels)


class Batch(Protocol):
    """``N`` environments, reset one by one but stepped together. Tensors lie on ``device``."""

    num_envs: int
    device: torch.device

    @property
    def spec(self) -> SimulatorSpec: ...

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        """Reset ``rows``; ``seeds`` has one entry for each of the ``N`` environments.

        An episode depends on its own seed only. Returns the ``N`` current instructions.
        """

    def step(self, actions: Tensor) -> tuple[Tensor, ...]:
        """Run one control step of all environments with ``actions`` ``[N, D]``.

        Returns reward float32, terminated bool and success bool, each ``[N]``; a simulator that
        ends episodes itself also truncated bool.
        """

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Observe ``R`` rows: state float32 ``[R, S]``, images name -> uint8 ``[R, H, W, 3]``."""

    def expert(self) -> Tensor:
        """The scripted expert's actions for the present state: float32 ``[N, D]``."""

    def render(self, index: int) -> Tensor:
        """Image of one environment for display: uint8 ``[H, W, 3]``."""

    def close(self) -> None: ...
