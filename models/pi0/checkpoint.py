"""Read published π₀ and π₀.₅ checkpoints: openpi's in JAX and in PyTorch, and lerobot's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError

from ..config_file import read_config
from ..files import CONFIG, State, read_json, read_weights
from .gemma import GEMMA, GemmaConfig
from .network import PALIGEMMA_VOCABULARY, SIGLIP, Pi0Config
from .openpi import LANGUAGE, LM_HEAD, JaxCheckpoint

NORM_STATS = "norm_stats.json"
EMBEDDING = f"{LANGUAGE}.embed_tokens.weight"


def read_document(directory: Path) -> dict[str, Any]:
    """Return config.json; for a checkpoint in JAX, which has none, the sizes of its arrays.

    A config.json beside JAX's arrays overrides them. Raises UserError.
    """
    if not JaxCheckpoint.is_one(directory):
        return read_config(directory)
    given = read_config(directory) if (directory / CONFIG).exists() else {}
    return JaxCheckpoint(directory).config | given


def network_config(config: dict[str, Any]) -> Pi0Config:
    """Return the sizes in config.json, given as openpi's variant names or (ours) as numbers.

    ``pi05`` is read from the key of that name, else derived from lerobot's ``type``. Raises
    UserError if the horizon is not known.
    """
    horizon = config.get("action_horizon", config.get("chunk_size"))
    if horizon is None:
        raise UserError(
            "model.options.action_horizon: the checkpoint does not say how many actions it denoises. Set it as in openpi's training config "
            "(50 by default, 10 for pi05_libero), or set model.options.card"
        )
    return Pi0Config(
        paligemma=_gemma(config, "paligemma", "gemma_2b"),
        expert=_gemma(config, "action_expert", "gemma_300m"),
        vision=config.get("vision", SIGLIP),
        vocab_size=config.get("vocab_size", PALIGEMMA_VOCABULARY),
        action_dim=config.get("action_dim", config.get("max_action_dim", 32)),
        horizon=horizon,
        pi05=config.get("pi05", config.get("type") == "pi05"),
    )


def _gemma(config: dict[str, Any], name: str, default: str) -> GemmaConfig:
    if isinstance(config.get(name), dict):
        return GemmaConfig(**config[name])
    variant = config.get(f"{name}_variant", default)
    if variant not in GEMMA:
        raise UserError(f"{CONFIG}: {name}_variant {variant!r} is not known: one of {', '.join(GEMMA)}")
    return GEMMA[variant]


def read_state(directory: Path) -> State:
    """Return weights under openpi's names, without lerobot's prefix; tied ones are LM_HEAD."""
    jax = JaxCheckpoint.is_one(directory)
    stored: State = JaxCheckpoint(directory).state() if jax else read_weights(directory)
    state = {name.removeprefix("model."): value for name, value in stored.items()}
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
