"""Instructions as tensors: rows of UTF-8 bytes, padded with zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

LENGTH = 1024
"""Bytes of a row."""


def as_bytes(instructions: list[str]) -> Tensor:
    """Return uint8 ``[B, LENGTH]``. Raises UserError for an instruction that is too long."""
    found = torch.zeros(len(instructions), LENGTH, dtype=torch.uint8)
    for row, instruction in zip(found, instructions, strict=True):
        data = instruction.encode()
        if len(data) > LENGTH:
            raise UserError(f"instruction {instruction[:40]!r}... has {len(data)} bytes, a policy server gets at most {LENGTH}: shorten it")
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row[:0]
    return found


def as_text(row: Tensor) -> str:
    """Return the instruction of a row, uint8 ``[LENGTH]``."""
    return bytes(row.tolist()).rstrip(b"\0").decode()
