"""Recipe options of GR00T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from rlinf_vla.config.ranges import Label, NonEmpty, OneOf, Range

from ..flow_options import FlowOptions
from ..options import LLAMA_LINEARS

MODES = {"min_max": "MIN_MAX", "q99": "QUANTILES", "mean_std": "MEAN_STD"}
"""Normalisation by its official name -> by that of ``models/normalizer.py``."""


@dataclass
class GR00TOptions(FlowOptions):
    """Recipe node ``model.options``."""

    lora_targets: ClassVar[tuple[str, ...]] = (
        *LLAMA_LINEARS,
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "net.0.proj",
        "net.2",
    )

    embodiment: Label | None = None
    """Embodiment tag, which selects statistics and projectors. null: the only one that the
    checkpoint's metadata.json has."""
    projector: Annotated[int, Range(0, 4095)] | None = None
    """Index of the embodiment's projectors; null: as officially assigned to its tag."""
    state: Annotated[list[Label], NonEmpty()] | None = None
    """Parts of the state in metadata.json, in the order in which they form the environment's state.
    null: all, in the order of the file."""
    actions: Annotated[list[Label], NonEmpty()] | None = None
    """Parts of an action, in the same way."""
    normalization: Annotated[str, OneOf(*MODES)] = "min_max"
    """How states and actions were normalised, which only the official data config says."""
    crop: Annotated[float, Range(0, 1, above=True)] = 0.95
    """Side of the centre crop of images, as a share; also from the data config."""
    instruction_as_list: bool = False
    """Write the instruction as Python writes a list, ``['push it']``, as lerobot's GR00T does, and
    NVIDIA's policy server if it is sent a list."""
