"""Observations in messages to our own server, and on the way there as tensors.

An instruction is then a row of UTF-8 bytes, padded with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import PolicySpec
from rlinf_vla.core.types import Inputs, Observation

IMAGE = "image."
"""Prefix of the inputs that are images."""

LENGTH = 1024
"""Bytes of a row."""


def as_bytes(instructions: list[str]) -> Tensor:
    """Return uint8 ``[B, LENGTH]``. Raises UserError for an instruction that is too long."""
    rows = torch.zeros(len(instructions), LENGTH, dtype=torch.uint8)
    for row, instruction in zip(rows, instructions, strict=True):
        data = instruction.encode()
        if len(data) > LENGTH:
            raise UserError(
                f"instruction {instruction[:40]!r}... has {len(data)} bytes, another process gets at most {LENGTH}: shorten it"
            )
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row[:0]
    return rows


def as_text(row: Tensor) -> str:
    """Return the instruction of a row, uint8 ``[LENGTH]``."""
    return bytes(row.tolist()).rstrip(b"\0").decode()


def raw_inputs(obs: Observation, spec: PolicySpec) -> Inputs:
    """Return what a policy of ``spec`` reads, unchanged: the server prepares it as the policy does.

    Raises UserError for an instruction that is too long.
    """
    images = {f"{IMAGE}{name}": obs.images[name] for name in spec.images}
    return images | {
        "state": obs.state[:, : spec.state_dim],
        "instruction": as_bytes(obs.instruction),
    }


def observation_message(inputs: Inputs) -> dict[str, Any]:
    """Return ``raw_inputs`` as the observation of a request, all rows in one."""
    return {
        "images": {
            name.removeprefix(IMAGE): value.numpy()
            for name, value in inputs.items()
            if name.startswith(IMAGE)
        },
        "state": inputs["state"].numpy(),
        "instruction": [as_text(row) for row in inputs["instruction"]],
    }
