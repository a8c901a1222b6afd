"""Read and write SmolVLA's checkpoints in lerobot's layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

from ..config_file import check_sizes, read_config
from ..config_keys import Only, Table, Use, keys
from ..files import CONFIG, TOKENIZER, State, read_json, read_weights
from ..lerobot import BUFFER_PREFIXES, KEYS, has_processors
from .network import SmolVLAConfig

VLM_CONFIG = "vlm_config.json"
"""SmolVLM's own config.json, which lerobot finds by ``vlm_model_name``; absent for VLM."""
VLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
SMOLVLM2_500M: dict[str, Any] = {
    "text_config": {
        "vocab_size": 49280,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
    "scale_factor": 4,
}
"""Sizes of VLM."""
_EMBEDDING = "vlm_with_expert.vlm.model.text_model.embed_tokens.weight"
_LM_HEAD = "vlm_with_expert.vlm.lm_head.weight"
_TEXT = tuple(SMOLVLM2_500M["text_config"])
_VISION = tuple(SMOLVLM2_500M["vision_config"])
TABLE: Table = {
    **KEYS,
    **keys(
        Use.READ,
        "resize_imgs_with_padding tokenizer_max_length num_steps vlm_model_name attention_mode num_expert_layers",
    ),
    **keys(Use.READ, "num_vlm_layers self_attn_every_n_layers expert_width_multiplier"),
    "add_image_special_tokens": Only(False),
    **keys(Use.SPEED, "prefix_length pad_language_to"),
    **keys(Use.TRAINING, "load_vlm_weights fine_tune_vision_encoder vision_encoder_lr_multiplier"),
}
"""Source: lerobot (7427f318) ``policies/smolvla/configuration_smolvla.py``."""


def read_document(directory: Path) -> dict[str, Any]:
    """Return config.json. Raises UserError if it is not SmolVLA's."""
    document = read_config(directory)
    if document.get("type") != "smolvla":
        raise UserError(
            f"{directory / CONFIG}: type is {document.get('type')!r}, not 'smolvla': choose another model or model.checkpoint"
        )
    return document


def network_config(directory: Path, document: Mapping[str, Any]) -> SmolVLAConfig:
    """Return the network's sizes. Raises UserError for a combination that lerobot cannot run."""
    vlm = _vlm_sizes(directory, document)
    text = {name: vlm["text_config"][name] for name in _TEXT}
    vision = {name: vlm["vision_config"][name] for name in _VISION}
    depth, layers = document["num_vlm_layers"], text["num_hidden_layers"]
    depth = min(depth, layers) if depth > 0 else layers
    if document["num_expert_layers"] > 0 and document["num_expert_layers"] != depth:
        raise UserError(
            f"{directory / CONFIG}: num_expert_layers={document['num_expert_layers']} is not supported, {depth} is: {_OTHER}"
        )
    size = [vision["image_size"]] * 2
    if document["resize_imgs_with_padding"] != size:
        actual = document["resize_imgs_with_padding"]
        raise UserError(
            f"{directory / CONFIG}: resize_imgs_with_padding={actual} is not supported, {size} is: {_OTHER}"
        )
    every = document["self_attn_every_n_layers"]
    crossed = "cross" in document["attention_mode"]
    return SmolVLAConfig(
        text=text,
        vision=vision,
        scale_factor=vlm["scale_factor"],
        cross=tuple(crossed and not (every > 0 and layer % every == 0) for layer in range(depth)),
        expert_width=int(text["hidden_size"] * document["expert_width_multiplier"]),
        state_dim=document["max_state_dim"],
        action_dim=document["max_action_dim"],
        horizon=document["chunk_size"],
        min_period=document["min_period"],
        max_period=document["max_period"],
    )


_OTHER = "choose another model.checkpoint"


def _vlm_sizes(directory: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    path = directory / VLM_CONFIG
    if path.exists():
        sizes = read_json(path)
        check_sizes(sizes, path)
        return sizes
    if document.get("vlm_model_name") != VLM:
        raise UserError(
            f"{directory / CONFIG}: vlm_model_name {document.get('vlm_model_name')!r} is not known: "
            f"copy that model's config.json into the directory as {VLM_CONFIG}, and its {TOKENIZER}"
        )
    return SMOLVLM2_500M


def read_state(directory: Path) -> State:
    """Return the network's weights under its own names, without statistics."""
    stored = read_weights(directory)
    state: dict[str, Any] = {
        name.removeprefix("model.").removeprefix("_orig_mod."): value
        for name, value in stored.items()
        if not name.startswith(BUFFER_PREFIXES)
    }
    if not any(name.startswith("vlm_with_expert.") for name in state):
        raise UserError(
            f"{directory} holds no weights of a SmolVLA (first key {min(stored)}): {_OTHER}"
        )
    if _EMBEDDING in state:
        state.setdefault(_LM_HEAD, state[_EMBEDDING])
    return state


def read_buffers(directory: Path) -> dict[str, Tensor]:
    """Return statistics among the weights, where lerobot kept them before it had processors."""
    if has_processors(directory):
        return {}
    return {
        name: value.read().clone()
        for name, value in read_weights(directory).items()
        if name.startswith(BUFFER_PREFIXES)
    }


def stored_tensors(state: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors by lerobot's names."""
    return {f"model.{name}": value for name, value in state.items()} | dict(buffers)


def stored_dtypes(
    dtypes: Mapping[str, torch.dtype], buffers: Mapping[str, Tensor]
) -> dict[str, torch.dtype]:
    return {f"model.{name}": value for name, value in dtypes.items()} | dict.fromkeys(
        buffers, torch.float32
    )


def copy_files(source: Path, tokenizer: Path, target: Path) -> None:
    """Copy what training does not change: tokenizer, the language model's sizes, processors."""
    shutil.copyfile(tokenizer, target / TOKENIZER)
    for pattern in (VLM_CONFIG, "policy_preprocessor*", "policy_postprocessor*"):
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)
