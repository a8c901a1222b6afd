"""Options of every pre-trained model. Modules of options need no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.config.ranges import OneOf


@dataclass
class WeightOptions:
    """Options in ``model.options`` on the weights of a pre-trained model."""

    random_weights: bool = False
    """Start from random weights; the checkpoint then needs no weight files."""
    dtype: Annotated[str, OneOf("float32", "bfloat16")] = "float32"
    """Data type of the network in memory. Use bfloat16 for a model of billions of weights on a GPU.
    Adapters, heads and probabilities are float32 in either case."""
