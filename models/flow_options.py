"""Options of every policy that denoises a chunk with an action expert."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rlinf_vla.config.ranges import Interval, Label, Name, NonEmpty, OneOf, Positive, Range, Size

from .options import GRIPPERS, LLAMA_LINEARS, WeightOptions

SAMPLERS = ("flow_sde", "flow_sde_all", "flow_noise")
CRITICS = ("expert", "vlm", "both")
CHAINS = ("sum", "mean")


@dataclass
class FlowOptions(WeightOptions):
    """Options in ``model.options`` of a flow policy."""

    lora_targets: ClassVar[tuple[str, ...]] = LLAMA_LINEARS

    card: Name | None = None
    """Card of a published checkpoint, whose values null options take (docs/pi0.md). null: found by
    the repository's name; ``none``: no card."""
    images: Annotated[list[Label], NonEmpty()] | None = None
    """Cameras of the environment, in the order of the model's image slots (base, left wrist, right
    wrist). Empty slots cost nothing. null: as the card says, else [base]."""
    chunk: Annotated[int, Range(1, 1024)] | None = None
    """Actions to execute of a denoised horizon; null: as the card says, else ``n_action_steps`` of
    lerobot's config.json, else all."""
    gripper: Annotated[str, OneOf(*GRIPPERS)] | None = None
    """What the last number of an action becomes. ``open_positive``, ``close_positive``: ±1 for an
    environment in which +1 opens or closes, from a dataset of 0 (closed) to 1 (open). ``raw``: it
    stays. null: as the card says, else raw."""
    prompt_length: Size | None = None
    """Token ids per prompt, padding included. null: 48 (200 with the state in the prompt), or more
    if an instruction of the environment needs more."""
    denoise_steps: Annotated[int, Range(1, 1000)] | None = None
    """Number of denoising steps per chunk. null: as in config.json (``num_steps``,
    ``num_inference_steps``, ``num_inference_timesteps``), else 10."""
    sampler: Annotated[str, OneOf(*SAMPLERS)] = "flow_sde"
    """Which denoising steps are stochastic: one at random, all, or all with learnt noise."""
    noise_level: Positive = 0.5
    """Standard deviation of a stochastic step at t = 1 without learnt noise; scales all others."""
    noise_range: Annotated[list[Positive], Interval()] = field(default_factory=lambda: [0.08, 0.16])
    """Minimum and maximum of the standard deviation that flow_noise learns."""
    value_on: Annotated[str, OneOf(*CRITICS)] = "expert"
    """Input of the critic. ``expert``: the expert's states at x = 0 and t = 1, which include the
    robot state. ``vlm``: mean state of the tokens that the expert attends to. ``both``: one after
    the other."""
    detach_critic: bool = False
    """The critic's gradient stops before its input, so that it trains the value head alone."""
    chain_log_prob: Annotated[str, OneOf(*CHAINS)] = "sum"
    """Log-probability and entropy of a chain, ``flow_sde_all`` or ``flow_noise``: the ``sum`` over
    its draws, the initial noise among them, or their ``mean``, as in πRL."""
    frozen_vlm: bool = True
    """Train only the action expert and its projections; the language model has no gradients."""
