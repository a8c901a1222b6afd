"""Read and write checkpoints of GR00T N1.5 in NVIDIA's layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError

from ..config_file import check_sizes, read_config
from ..files import CONFIG, TOKENIZER, State, Unread, read_json, read_weights
from .dit import HeadConfig, TransformerSizes
from .eagle import EagleConfig
from .options import GR00TOptions

MODEL_TYPE = "gr00t_n1_5"
METADATA = "experiment_cfg/metadata.json"
EAGLE_CONFIG = "eagle_config.json"
"""Eagle's own config.json, which NVIDIA's code has beside it; absent for EAGLE."""
EAGLE = "NVEagle/eagle_er-qwen3_1_7B-Siglip2_400M_stage1_5_128gpu_er_v7_1mlp_nops"
EAGLE_SIZES: dict[str, Any] = {
    "text_config": {
        "vocab_size": 151680,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
    "use_pixel_shuffle": False,
    "downsample_ratio": 0.5,
    "mlp_connector_layers": 1,
}
"""Sizes of EAGLE."""
PROJECTORS = {"new_embodiment": 31, "oxe_droid": 17, "agibot_genie1": 26, "gr1": 24}
"""Embodiment tag -> index of its projectors. Source: Isaac-GR00T ``data/embodiment_tags.py``."""
OTHER = "choose another model.checkpoint"
_LANGUAGE = "backbone.eagle_model.language_model."
_EMBEDDING = f"{_LANGUAGE}model.embed_tokens.weight"
_LM_HEAD = f"{_LANGUAGE}lm_head.weight"
_UNUSED = "backbone.eagle_model.vision_model.vision_model.head."
_PROJECTED = tuple(
    f"action_head.{name}." for name in ("state_encoder", "action_encoder", "action_decoder")
)


def read_document(directory: Path) -> dict[str, Any]:
    """Return config.json. Raises UserError for another model's."""
    document = read_config(directory)
    if document.get("model_type") != MODEL_TYPE:
        kind = document.get("model_type", document.get("type"))
        raise UserError(
            f"{directory / CONFIG}: model_type is {kind!r}, only {MODEL_TYPE!r} is supported (docs/gr00t.md): {OTHER}"
        )
    return document


def eagle_config(directory: Path, document: Mapping[str, Any]) -> EagleConfig:
    """Return the sizes of images' and text's network. Raises UserError if they are not known."""
    backbone = document["backbone_cfg"]
    sizes = _eagle_sizes(directory, backbone.get("eagle_path"))
    layers = backbone["select_layer"]
    most = sizes["text_config"]["num_hidden_layers"]
    if layers > most:
        raise UserError(
            f"{directory / CONFIG}: backbone_cfg.select_layer={layers}, the language model has {most} layers: {OTHER}"
        )
    connector = sizes["mlp_connector_layers"]
    if connector not in (1, 2) or sizes.get("select_layer", -1) != -1:
        raise UserError(
            f"{directory / EAGLE_CONFIG}: only 1 or 2 mlp_connector_layers and select_layer=-1 are supported: {OTHER}"
        )
    return EagleConfig(
        text={name: sizes["text_config"][name] for name in EAGLE_SIZES["text_config"]},
        vision={name: sizes["vision_config"][name] for name in EAGLE_SIZES["vision_config"]},
        layers=layers,
        shuffle=int(1 / sizes["downsample_ratio"]) if sizes["use_pixel_shuffle"] else 1,
        connector_layers=connector,
        project_to=backbone.get("project_to_dim", 1536),
    )


def _eagle_sizes(directory: Path, name: Any) -> dict[str, Any]:
    path = directory / EAGLE_CONFIG
    if path.exists():
        sizes = read_json(path)
        check_sizes(sizes, path)
        return sizes
    if name != EAGLE:
        raise UserError(
            f"{directory / CONFIG}: backbone_cfg.eagle_path {name!r} is not known: "
            f"copy that model's config.json into the directory as {EAGLE_CONFIG}, and its {TOKENIZER}"
        )
    return EAGLE_SIZES


def head_config(document: Mapping[str, Any], vlm_width: int) -> HeadConfig:
    head = document["action_head_cfg"]
    dit = head["diffusion_model_cfg"]
    alternating = dit.get("interleave_self_attention", False)
    return HeadConfig(
        dit=_transformer(dit),
        cross=tuple(not (alternating and block % 2) for block in range(dit["num_layers"])),
        vl=_transformer(head["vl_self_attention_cfg"]),
        vlm_width=vlm_width,
        hidden=head["hidden_size"],
        state_dim=head["max_state_dim"],
        action_dim=head["action_dim"],
        horizon=head["action_horizon"],
        positions=head["max_seq_len"],
        future_tokens=head["num_target_vision_tokens"],
        time_buckets=head["num_timestep_buckets"],
    )


def _transformer(node: Mapping[str, Any]) -> TransformerSizes:
    return TransformerSizes(
        node["num_layers"], node["num_attention_heads"], node["attention_head_dim"]
    )


def read_embodiment(
    directory: Path, document: Mapping[str, Any], options: GR00TOptions
) -> tuple[str, int]:
    """Return the embodiment tag and the index of its projectors. Raises UserError."""
    tags = list(read_json(directory / METADATA))
    tag = options.embodiment or (tags[0] if len(tags) == 1 else None)
    if tag not in tags:
        problem = "is not given" if tag is None else f"{tag} has no statistics"
        raise UserError(
            f"model.options.embodiment {problem}: {directory / METADATA} has {', '.join(tags)}, choose one of them"
        )
    index = PROJECTORS.get(tag) if options.projector is None else options.projector
    if index is None:
        raise UserError(
            f"model.options.projector: the index of {tag}'s projectors is not known, give it"
        )
    if index >= (count := document["action_head_cfg"]["max_num_embodiments"]):
        raise UserError(
            f"model.options.projector={index}: the checkpoint has projectors 0 to {count - 1}"
        )
    return tag, index


def read_statistics(
    directory: Path, tag: str, kind: str, parts: list[str] | None
) -> dict[str, list[float]]:
    """Return the statistics of ``kind`` (state or action), joined in the order of ``parts``."""
    statistics = read_json(directory / METADATA)[tag]["statistics"][kind]
    parts = list(statistics) if parts is None else list(parts)
    option = "state" if kind == "state" else "actions"
    if absent := [part for part in parts if part not in statistics]:
        raise UserError(
            f"model.options.{option}: {tag} has no {kind} {absent[0]}, but {', '.join(statistics)}"
        )
    for part in parts:
        if len({len(values) for values in statistics[part].values()}) > 1:
            raise UserError(
                f"{directory / METADATA}: statistics of {tag}'s {kind} {part} differ in length: copy the checkpoint again"
            )
    return {
        name: [number for part in parts for number in statistics[part][name]]
        for name in statistics[parts[0]]
    }


@dataclass(frozen=True)
class Row:
    """One embodiment's part of a projector that is stored for all."""

    stored: Unread
    index: int

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape[1:]

    def read(self) -> Tensor:
        return self.stored.read()[self.index].clone()


def read_state(directory: Path, index: int) -> State:
    """Return the network's weights under its own names, with the projectors of one embodiment."""
    stored = read_weights(directory)
    if not any(name.startswith(_PROJECTED) for name in stored):
        raise UserError(
            f"{directory} holds no weights of a GR00T N1.5 (first key {min(stored)}): {OTHER}"
        )
    state: dict[str, Unread] = {
        name: value for name, value in stored.items() if not name.startswith((_UNUSED, _LM_HEAD))
    }
    if _EMBEDDING not in state and _LM_HEAD in stored:  # tied, and stored once under either name
        state[_EMBEDDING] = stored[_LM_HEAD]
    for name in state.keys() & stored.keys():
        if name.startswith(_PROJECTED):
            state[name] = Row(stored[name], index)
    return state


def stored_tensors(
    state: Mapping[str, Tensor], source: Path | None, index: int, embodiments: int
) -> dict[str, Tensor]:
    """Return the tensors of a file by their official names.

    What the network lacks, other embodiments' projectors and unused layers, is that of ``source``.
    Without one, all embodiments get the same.
    """
    stored = {} if source is None else read_weights(source)
    tensors = dict(state)
    for name, value in state.items():
        if name.startswith(_PROJECTED):
            rows = (
                stored[name].read().clone()
                if name in stored
                else value.detach().cpu().expand(embodiments, *value.shape).clone()
            )
            rows[index] = value.detach().to(rows)
            tensors[name] = rows
    tensors |= {name: value.read() for name, value in stored.items() if name.startswith(_UNUSED)}
    return tensors | ({_LM_HEAD: state[_EMBEDDING].detach().clone()} if _LM_HEAD in stored else {})


def copy_files(source: Path, tokenizer: Path, target: Path) -> None:
    """Copy what training does not change: tokenizer, statistics, Eagle's sizes."""
    shutil.copyfile(tokenizer, target / TOKENIZER)
    (target / METADATA).parent.mkdir(exist_ok=True)
    for name in (METADATA, EAGLE_CONFIG):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
