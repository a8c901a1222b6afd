"""Read lerobot's own keys of config.json and its names of weights.

Source: lerobot (7427f318) ``policies/pi0*/configuration_*.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_vla.config.errors import UserError

_PALIGEMMA = "paligemma_with_expert.paligemma."
RENAMED = {
    f"{_PALIGEMMA}language_model.model.": f"{_PALIGEMMA}model.language_model.",
    f"{_PALIGEMMA}language_model.lm_head.": f"{_PALIGEMMA}lm_head.",
    f"{_PALIGEMMA}vision_tower.": f"{_PALIGEMMA}model.vision_tower.",
    f"{_PALIGEMMA}multi_modal_projector.": f"{_PALIGEMMA}model.multi_modal_projector.",
}
"""Prefixes before transformers 4.52 -> those since."""

MEMORIES = ("use_visual_memory", "use_proprioceptive_memory")
"""Keys of a π₀.₅ that is given earlier images or states, too."""


def is_one(document: Mapping[str, Any]) -> bool:
    return "chunk_size" in document


def layout_of(config: Mapping[str, Any]) -> str | None:
    """Return whose layout a checkpoint with this config.json has; None if it is not known yet."""
    if not config:
        return None
    return "lerobot" if is_one(config) else "openpi"


def with_our_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Return lerobot's config.json with our keys beside its own; ours win. Raises UserError."""
    if memories := [name for name in MEMORIES if document.get(name)]:
        raise UserError(f"config.json: {memories[0]} is set, and a policy here sees only the present: choose another model.checkpoint")
    keys = {
        "simulated_delay": document.get("rtc_training_max_delay") or 0,
        "action_horizon": document["chunk_size"],
        "action_dim": document.get("max_action_dim", 32),
        "pi05": document.get("type") == "pi05",
    }
    if document.get("use_relative_actions"):
        names, absolute = document.get("action_feature_names"), document.get("relative_exclude_joints") or []
        if not names and "delta_mask" not in document:
            raise UserError("config.json: use_relative_actions is set without action_feature_names: add delta_mask there, such as [6,-1]")
        keys["delta_mask"] = [-1 if any(part in name for part in absolute) else 1 for name in names or []]
    return keys | document


def renamed(name: str) -> str:
    """Return openpi's name of a weight of any version of lerobot."""
    name = name.removeprefix("model.")
    for before, now in RENAMED.items():
        if name.startswith(before):
            return now + name.removeprefix(before)
    return name
