"""Read published π₀ and π₀.₅ checkpoints: openpi's PyTorch layout and lerobot's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError

from ..files import CONFIG, Stored, read_json, read_weights
from .gemma import GEMMA, GemmaConfig
from .network import PALIGEMMA_VOCABULARY, SIGLIP, Pi0Config

NORM_STATS = "norm_stats.json"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


def network_config(config: dict[str, Any]) -> Pi0Config:
    """Return the sizes in config.json, given as openpi's variant names or (ours) as numbers.

    ``pi05`` is read from the key of that name, else derived from lerobot's ``type``.
    """
    return Pi0Config(
        paligemma=_gemma(config, "paligemma", "gemma_2b"),
        expert=_gemma(config, "action_expert", "gemma_300m"),
        vision=config.get("vision", SIGLIP),
        vocab_size=config.get("vocab_size", PALIGEMMA_VOCABULARY),
        action_dim=config.get("action_dim", config.get("max_action_dim", 32)),
        horizon=config.get("action_horizon", config.get("chunk_size", 50)),
        pi05=config.get("pi05", config.get("type") == "pi05"),
    )


def _gemma(config: dict[str, Any], name: str, default: str) -> GemmaConfig:
    if isinstance(config.get(name), dict):
        return GemmaConfig(**config[name])
    variant = config.get(f"{name}_variant", default)
    if variant not in GEMMA:
        raise UserError(f"{CONFIG}: {name}_variant {variant!r} is not known: one of {', '.join(GEMMA)}")
    return GEMMA[variant]


def read_state(directory: Path) -> dict[str, Stored]:
    """Return weights under openpi's names, without lerobot's prefix; tied ones are LM_HEAD."""
    state = {name.removeprefix("model."): value for name, value in read_weights(directory).items()}
    if not any(name.startswith("paligemma_with_expert.") for name in state):
        raise UserError(f"{directory} holds no openpi weights (first key {min(state)}): convert it with openpi's or lerobot's own script")
    embedding = state.pop(EMBEDDING, None)
    if embedding is not None:
        state.setdefault(LM_HEAD, embedding)
    return state


def read_norm_stats(directory: Path, asset_id: str | None) -> dict[str, Any]:
    """Return ``state`` and ``actions`` statistics. Raises UserError if ``asset_id`` is ambiguous.

    Read from ``assets/ASSET_ID/norm_stats.json``, or ``norm_stats.json`` beside the weights.
    """
    found = {path.parent.relative_to(directory / "assets").as_posix(): path for path in sorted(directory.glob(f"assets/**/{NORM_STATS}"))}
    if (directory / NORM_STATS).exists():
        found["."] = directory / NORM_STATS
    if asset_id is None and len(found) == 1:
        return read_json(next(iter(found.values())))["norm_stats"]
    if asset_id is None or asset_id not in found:
        raise UserError(f"model.options.asset_id={asset_id}: {directory} has {NORM_STATS} for {sorted(found)}, choose one")
    return read_json(found[asset_id])["norm_stats"]
