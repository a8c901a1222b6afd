"""Read lerobot's own keys of config.json and its names of weights.

Sources: lerobot (7427f318) ``policies/pi0*/configuration_*.py`` and
``processor/relative_action_processor.py``; openpi's ``convert_jax_model_to_pytorch.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_vla.config.errors import UserError

from ..config_keys import Only, Table, Use, keys
from ..lerobot import KEYS

_PALIGEMMA = "paligemma_with_expert.paligemma."
RENAMED = {
    f"{_PALIGEMMA}language_model.model.": f"{_PALIGEMMA}model.language_model.",
    f"{_PALIGEMMA}language_model.lm_head.": f"{_PALIGEMMA}lm_head.",
    f"{_PALIGEMMA}vision_tower.": f"{_PALIGEMMA}model.vision_tower.",
    f"{_PALIGEMMA}multi_modal_projector.": f"{_PALIGEMMA}model.multi_modal_projector.",
}
"""Prefixes before transformers 4.52 -> those since."""

OURS: Table = keys(
    Use.READ,
    "paligemma action_expert vision paligemma_variant action_expert_variant vocab_size action_dim action_horizon bos_token_id pi05 "
    "delta_mask simulated_delay card norm_stats normalization min_period max_period num_inference_steps num_steps",
)
OPENPI: Table = {**OURS, **keys(Use.SPEED, "precision dtype")}
"""Of openpi's config.json, with our keys beside its own."""


def table_of(document: Mapping[str, Any], image_size: int) -> Table:
    """Return the table of a config.json, whose images have ``image_size`` pixels a side."""
    if not is_one(document):
        return OPENPI
    size = [image_size, image_size]
    return {
        **OPENPI,
        **KEYS,
        **keys(
            Use.READ,
            "use_relative_actions relative_exclude_joints action_feature_names rtc_training_max_delay",
        ),
        **keys(
            Use.SPEED,
            "attention_implementation memory_frames memory_stride memory_temporal_attention_every",
        ),
        **keys(
            Use.TRAINING,
            "optimizer_fused time_sampling_beta_alpha time_sampling_beta_beta time_sampling_scale time_sampling_offset",
        ),
        **dict.fromkeys(("image_resolution", "resize_imgs_with_padding"), Only(size)),
        "text_tokenizer_name": Only(PALIGEMMA),
        "proj_width": Only(1024),
        # earlier images or states, of which a policy here has none
        **dict.fromkeys(("use_visual_memory", "use_proprioceptive_memory"), Only(False)),
    }


PALIGEMMA = "google/paligemma-3b-pt-224"
"""Repository of the tokenizer."""


def is_one(document: Mapping[str, Any]) -> bool:
    return "chunk_size" in document


def layout_of(config: Mapping[str, Any]) -> str | None:
    """Return whose layout a checkpoint with this config.json has; None if it is not known yet."""
    if not config:
        return None
    return "lerobot" if is_one(config) else "openpi"


def with_our_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Return lerobot's config.json with our keys beside its own; ours win."""
    our_keys = {
        "simulated_delay": document.get("rtc_training_max_delay") or 0,
        "action_horizon": document["chunk_size"],
        "action_dim": document.get("max_action_dim", 32),
        "pi05": document.get("type") == "pi05",
    }
    return our_keys | document


def delta_mask(document: Mapping[str, Any], action_dim: int) -> list[int]:
    """Return ``delta_mask`` of config.json, or lerobot's, which compares names in lower case
    and takes an action without a name as relative. Raises UserError if it has no names."""
    if "delta_mask" in document or not document.get("use_relative_actions"):
        return document.get("delta_mask", [])
    excluded = document.get("relative_exclude_joints", ["gripper"]) or []
    absolute = [str(part).lower() for part in excluded if part]
    names = [str(name).lower() for name in document.get("action_feature_names") or []][:action_dim]
    if absolute and not names:
        raise UserError(
            "config.json: use_relative_actions is set without action_feature_names: add delta_mask there, such as [6,-1]"
        )
    mask = [-1 if any(part in name for part in absolute) else 1 for name in names]
    return mask + [1] * (action_dim - len(mask))


def renamed(name: str) -> str:
    """Return openpi's name of a weight of any version of lerobot."""
    name = name.removeprefix("model.")
    for before, now in RENAMED.items():
        if name.startswith(before):
            return now + name.removeprefix(before)
    return name
