"""What a recipe may set of π₀ and π₀.₅."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rlinf_vla.ranges import Interval, Label, NonEmpty, OneOf, Positive, Range, Size

from .. import files

SAMPLERS = ("flow_sde", "flow_sde_all", "flow_noise")
CRITICS = ("expert", "vlm")


@dataclass
class Pi0Options(files.WeightOptions):
    """Recipe node ``model.options``."""

    images: Annotated[list[Label], NonEmpty()] = field(default_factory=lambda: ["base"])
    """The environment's cameras, in the order of the model's slots (base, left wrist, right wrist). Empty slots cost nothing."""
    chunk: Annotated[int, Range(1, 1024)] | None = None
    """Actions that are executed of a denoised horizon; null: all."""
    prompt_length: Size = 48
    """Token ids per prompt, padding included; 200 where the state is part of it."""
    state_in_prompt: bool | None = None
    """null: π₀.₅ reads the state in its prompt, π₀ as a token. The published pi05_libero reads none: false."""
    delta_mask: list[Annotated[int, Range(-1024, 1024)]] | None = None
    """Which actions are relative to the state at the start of the chunk, in openpi's notation: [6,-1] is six that are, then one that is
    not (pi0_libero; [7,-1] of seven joints). null: what config.json says (ours), else none."""
    asset_id: Label | None = None
    """Whose norm_stats.json; needed only where the checkpoint has several."""
    denoise_steps: Annotated[int, Range(1, 1000)] = 10
    sampler: Annotated[str, OneOf(*SAMPLERS)] = "flow_sde"
    noise_level: Positive = 0.5
    """Standard deviation of the first stochastic step; the others follow from it."""
    noise_range: Annotated[list[Positive], Interval()] = field(default_factory=lambda: [0.08, 0.16])
    """Least and greatest standard deviation that flow_noise learns."""
    value_on: Annotated[str, OneOf(*CRITICS)] = "expert"
    """What the critic reads: expert (its states at pure noise; the state is in them) or vlm (mean state of images and text)."""
    frozen_vlm: bool = True
    """Only the action expert learns; PaliGemma runs without gradients."""
