"""Options of every pre-trained model. Modules of options need no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.config.ranges import OneOf

LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a Llama-like layer by their names in transformers."""

GRIPPERS = {"raw": 0, "open_positive": 1, "close_positive": -1}
"""``model.options.gripper`` -> the sign of an action that opens; 0 leaves the dataset's numbers."""


@dataclass
class WeightOptions:
    """Options in ``model.options`` on the weights of a pre-trained model."""

    random_weights: bool = False
    """Start from random weights; the checkpoint then needs no weight files."""
    dtype: Annotated[str, OneOf("float32", "bfloat16")] | None = None
    """Data type of the network in memory. null: bfloat16 for a published checkpoint (one with a
    card), else float32. Adapters, heads and probabilities are float32 in either case."""
