"""Read published π₀ and π₀.₅ checkpoints: openpi's in JAX and in PyTorch, and lerobot's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError

from ..cards import names_part
from ..config_file import read_config
from ..files import CONFIG, FULL_WEIGHTS, INDEX, WEIGHTS, State, read_json, read_weights
from ..lerobot import BUFFER_PREFIXES, read_statistics
from ..normalizer import Normalizer
from . import lerobot
from .gemma import GEMMA, GemmaConfig
from .network import PALIGEMMA_VOCABULARY, SIGLIP, Pi0Config
from .openpi import LANGUAGE, LM_HEAD, PARAMS, JaxCheckpoint
from .processor import NORM_STATS

OTHER_REMEDY = f", or put openpi's {NORM_STATS} of the same data into that directory"
EMBEDDING = f"{LANGUAGE}.embed_tokens.weight"


def read_document(directory: Path) -> dict[str, Any]:
    """Return config.json, with our keys beside lerobot's; for JAX's arrays their sizes.

    openpi's config.json does not tell π₀.₅ from π₀: the weights do. Raises UserError.
    """
    if JaxCheckpoint.is_one(directory.parent) and directory.name == PARAMS:
        raise UserError(
            f"{directory} has only the arrays of a checkpoint: set model.checkpoint={directory.parent}"
        )
    jax = JaxCheckpoint.is_one(directory)
    optional = jax or any((directory / name).exists() for name in (INDEX, WEIGHTS, FULL_WEIGHTS))
    config = {} if optional and not (directory / CONFIG).exists() else read_config(directory)
    if lerobot.is_one(config):
        return lerobot.with_our_keys(config)
    if jax:
        return JaxCheckpoint(directory).config | config
    if "pi05" not in config:  # without weights, as in a dry run, only the name tells
        config["pi05"] = (
            "time_mlp_in.weight" in read_weights(directory)
            if optional
            else names_part(directory, "pi05")
        )
    return config


def network_config(config: dict[str, Any]) -> Pi0Config:
    """Return the sizes in config.json, given as openpi's variant names or (ours) as numbers.

    Raises UserError if the horizon is not known.
    """
    if "action_horizon" not in config:
        raise UserError(
            "model.options.action_horizon: the checkpoint does not say how many actions it denoises. Set it as in openpi's training config "
            "(50 by default, 10 for pi05_libero), or set model.options.card"
        )
    return Pi0Config(
        paligemma=_gemma(config, "paligemma", "gemma_2b"),
        expert=_gemma(config, "action_expert", "gemma_300m"),
        vision=config.get("vision", SIGLIP),
        vocab_size=config.get("vocab_size", PALIGEMMA_VOCABULARY),
        action_dim=config.get("action_dim", 32),
        horizon=config["action_horizon"],
        pi05=config.get("pi05", False),
        min_period=config.get("min_period", 4e-3),
        max_period=config.get("max_period", 4.0),
    )


def _gemma(config: dict[str, Any], name: str, default: str) -> GemmaConfig:
    if isinstance(config.get(name), dict):
        return GemmaConfig(**config[name])
    variant = config.get(f"{name}_variant", default)
    if variant not in GEMMA:
        raise UserError(
            f"{CONFIG}: {name}_variant {variant!r} is not known: one of {', '.join(GEMMA)}"
        )
    return GEMMA[variant]


def read_state(directory: Path) -> State:
    """Return weights under openpi's names, without lerobot's prefix; tied ones are LM_HEAD."""
    jax = JaxCheckpoint.is_one(directory)
    stored: State = JaxCheckpoint(directory).state() if jax else read_weights(directory)
    state = {
        lerobot.renamed(name): value
        for name, value in stored.items()
        if not name.startswith(BUFFER_PREFIXES)
    }
    if not any(name.startswith("paligemma_with_expert.") for name in state):
        raise UserError(
            f"{directory} holds no weights of a π₀ (first key {min(stored)}): choose another model.checkpoint"
        )
    embedding = state.pop(EMBEDDING, None)
    if embedding is not None:
        state.setdefault(LM_HEAD, embedding)
    return state


def read_normalizers(
    directory: Path, document: dict[str, Any], asset_id: str | None
) -> tuple[Normalizer, Normalizer]:
    """Return the normalisation of states and of actions.

    From openpi's norm_stats.json (by mean and std for π₀, by quantiles for π₀.₅), else from
    config.json (ours), else from lerobot's files, which are then put into ``document``. Raises
    UserError.
    """
    if lerobot.is_one(document) and not _norm_stats_files(directory):
        if "norm_stats" not in document:
            document["norm_stats"], document["normalization"] = read_statistics(
                directory, document, OTHER_REMEDY
            )
        statistics, kinds = document["norm_stats"], document["normalization"]
    else:
        statistics = read_norm_stats(directory, asset_id)
        kinds = dict.fromkeys(
            ("state", "actions"), "QUANTILES" if document.get("pi05") else "MEAN_STD"
        ) | {"epsilon": 1e-6}
    state, actions = (
        Normalizer(without_padding(statistics[name]), kinds[name], kinds["epsilon"], name)
        for name in ("state", "actions")
    )
    return state, actions


def without_padding(statistics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Cut dimensions at the end that are always 0: early openpi padded before it normalised."""
    mean, std = statistics.get("mean", []), statistics.get("std", [])
    count = size = len(mean)
    while count > 1 and len(std) == size and mean[count - 1] == std[count - 1] == 0:
        count -= 1
    return {
        name: values[:count] if len(values) == size else values
        for name, values in statistics.items()
    }


def _norm_stats_files(directory: Path) -> dict[str, Path]:
    """Return ASSET_ID -> norm_stats.json; in RLinf's directories not below ``assets``."""
    paths = {}
    for path in sorted(directory.glob(f"**/{NORM_STATS}")):
        paths[path.parent.relative_to(directory).as_posix().removeprefix("assets/")] = path
    return paths


def read_norm_stats(directory: Path, asset_id: str | None) -> dict[str, Any]:
    """Return ``state`` and ``actions`` statistics. Raises UserError if ``asset_id`` is ambiguous.

    Read from ``assets/ASSET_ID/norm_stats.json``, or ``norm_stats.json`` beside the weights.
    """
    paths = _norm_stats_files(directory)
    if not paths:
        raise UserError(
            f"{directory} has no {NORM_STATS}, which un-normalises actions: copy the checkpoint with its assets"
        )
    if asset_id is None and len(paths) == 1:
        return read_json(next(iter(paths.values())))["norm_stats"]
    if asset_id is None or asset_id not in paths:
        raise UserError(
            f"model.options.asset_id={asset_id}: {directory} has {NORM_STATS} for {sorted(paths)}, choose one"
        )
    return read_json(paths[asset_id])["norm_stats"]
