"""The simulator process: one gymnasium vector environment."""

from __future__ import annotations

from typing import Any

import torch

from rlinf_vla.types import UserError

from ..serving import Unusable
from ..serving_together import serve_together
from .batch import GymnasiumBatch


def create(options: dict[str, Any], slots: int) -> GymnasiumBatch:
    torch.set_num_threads(1)
    try:
        return GymnasiumBatch(options, slots)
    except UserError as error:
        raise Unusable(str(error)) from error


if __name__ == "__main__":
    serve_together(create)
