"""Recipe options of π₀ and π₀.₅."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rlinf_vla.config.ranges import Interval, Label, Name, NonEmpty, OneOf, Positive, Range, Size

from ..options import WeightOptions

SAMPLERS = ("flow_sde", "flow_sde_all", "flow_noise")
CRITICS = ("expert", "vlm", "both")


@dataclass
class Pi0Options(WeightOptions):
    """Recipe node ``model.options``."""

    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    card: Name | None = None
    """Card of a published checkpoint, whose values null options take (docs/pi0.md). null: found by
    the repository's name; ``none``: no card."""
    images: Annotated[list[Label], NonEmpty()] | None = None
    """Cameras of the environment, in the order of the model's image slots (base, left wrist, right
    wrist). Empty slots cost nothing. null: as the card says, else [base]."""
    action_horizon: Annotated[int, Range(1, 1024)] | None = None
    """Actions that the model denoises per call. null: as in config.json, or as the card says of
    openpi's checkpoints in JAX, which have none."""
    chunk: Annotated[int, Range(1, 1024)] | None = None
    """Actions to execute of a denoised horizon; null: as the card says, else ``n_action_steps`` of
    lerobot's config.json, else all."""
    prompt_length: Size | None = None
    """Token ids per prompt, padding included. null: 48 (200 with the state in the prompt), or more
    if an instruction of the environment needs more."""
    state_in_prompt: bool | None = None
    """Put the state into the prompt. null: yes for π₀.₅, no for π₀, which reads it as a token. The
    published pi05_libero reads no state: set false."""
    prompt_state_dim: Size | None = None
    """Numbers of the state in the prompt, padded with 0. null: as many as the state has. lerobot
    padded to 32 until 2026, so checkpoints that it trained before need 32."""
    delta_mask: list[Annotated[int, Range(-1024, 1024)]] | None = None
    """Action dimensions relative to the state at the start of the chunk, in openpi's notation:
    [6,-1] is six relative, then one absolute (pi0_libero; [7,-1] for seven joints). null: as in
    config.json (ours), else none."""
    simulated_delay: Annotated[int, Range(0, 1023)] | None = None
    """Longest delay, in control steps, that supervised training simulates: the model learns to
    continue as many given actions, and ``control.real_time_chunking`` gives them to it. null: as in
    config.json (ours), else 0."""
    asset_id: Label | None = None
    """Dataset whose norm_stats.json to use; needed only if the checkpoint has several."""
    denoise_steps: Annotated[int, Range(1, 1000)] = 10
    """Number of denoising steps per chunk."""
    sampler: Annotated[str, OneOf(*SAMPLERS)] = "flow_sde"
    """Which denoising steps are stochastic: one at random, all, or all with learnt noise."""
    noise_level: Positive = 0.5
    """Standard deviation of a stochastic step at t = 1 without learnt noise; scales all others."""
    noise_range: Annotated[list[Positive], Interval()] = field(default_factory=lambda: [0.08, 0.16])
    """Minimum and maximum of the standard deviation that flow_noise learns."""
    value_on: Annotated[str, OneOf(*CRITICS)] = "expert"
    """Input of the critic. ``expert``: the expert's states at x = 0 and t = 1, which include the
    robot state. ``vlm``: mean state of images and text. ``both``: one after the other."""
    frozen_vlm: bool = True
    """Train only the action expert; PaliGemma runs without gradients."""
