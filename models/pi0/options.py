"""Recipe options of π₀ and π₀.₅."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rlinf_vla.config.ranges import Label, Range, Size

from ..flow_options import FlowOptions


@dataclass
class Pi0Options(FlowOptions):
    """Recipe node ``model.options``."""

    action_horizon: Annotated[int, Range(1, 1024)] | None = None
    """Actions that the model denoises per call. null: as in config.json, or as the card says of
    openpi's checkpoints in JAX, which have none."""
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
