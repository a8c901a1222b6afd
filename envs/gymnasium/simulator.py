"""Simulator process of gymnasium: one vector environment."""

from __future__ import annotations

from typing import Any

import torch

from rlinf_vla.config.errors import UserError

from ..batch_serving import serve_together
from ..serving import SimulatorUnavailable
from .batch import GymnasiumBatch


def create(options: dict[str, Any], slots: int) -> GymnasiumBatch:
    torch.set_num_threads(1)
    try:
        return GymnasiumBatch(options, slots)
    except UserError as error:
        raise SimulatorUnavailable(str(error)) from error


if __name__ == "__main__":
    serve_together(create)
