"""Make tiny checkpoints: the official architectures at about a million parameters, no weights.

``python tools/tiny_checkpoints.py MODEL DIRECTORY [--action-dim N] [--patch-size P]``, MODEL one of
openvla, openvla_oft_plus, pi0, smolvla and gr00t,
writes config.json, tokenizer.json and statistics; of SmolVLA and GR00T also the sizes of their VLM.
``openvla_oft_plus`` is an OpenVLA-OFT+ (FiLM and proprioception).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlinf_vla.models.files import CONFIG, TOKENIZER, write_safetensors
from rlinf_vla.models.gr00t.checkpoint import EAGLE_CONFIG, METADATA, MODEL_TYPE
from rlinf_vla.models.lerobot import FEATURES, PROCESSORS
from rlinf_vla.models.openvla.checkpoint import STATISTICS
from rlinf_vla.models.openvla.processor import PROMPT
from rlinf_vla.models.pi0.checkpoint import NORM_STATS
from rlinf_vla.models.smolvla.checkpoint import VLM_CONFIG

STATE_LOW = [-0.2, -0.3, 0.0, -1, -1, -1, -1, 0.0]
STATE_HIGH = [0.2, 0.3, 0.3, 1, 1, 1, 1, 0.04]
"""Proprioception at a table: position (m), quaternion and the position of one finger (m)."""
VOCABULARY = 512
ACTION_BINS = 32
IMAGE = 64
CHUNK = 2
SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "\u2581",
)  # the last one stands for Llama's empty token 29871

# Words of manipulation instructions become one token each; other words fall back to characters.
WORDS = """push pull pick put place move stack lift turn open close roll poke insert slide rotate plug grasp grab drop release
the a an of to on onto in into at from with and then up down left right front back top above below behind next between inside it them
cube block ball sphere peg hole plate bowl basket towel cloth spoon carrot eggplant charger receptacle socket tool goal target region
drawer door cabinet box bin table robot arm gripper upright side end button handle cup mug bottle can object shape letter T pyramid
red green blue yellow orange purple white black gray brown pink small large big first second third other another"""


OFT_PLUS: dict[str, Any] = {
    "oft": {"head": "discrete", "chunk": 4, "proprio": True, "film": True, "stop_token": True},
    # FiLM conditions on the mean embedding of the instruction's words, of which only one differs
    # between instructions. With embeddings of the usual scale (0.05) its effect is too small: the
    # policy converges to the mean over all instructions, where the gradient vanishes.
    "embedding_std": 2.5,
}


def openvla_config(patch_size: int = 16) -> dict[str, Any]:
    tower = {
        "embed_dim": 96,
        "depth": 4,
        "num_heads": 4,
        "patch_size": patch_size,
        "img_size": IMAGE,
        "mlp_ratio": 3.0,
    }
    return {
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_sizes": [IMAGE, IMAGE],
        "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": True,
        "vision_config": {
            "featurizer": tower | {"class_token": True, "reg_tokens": 4, "layer_scale": True},
            "fused_featurizer": tower,
        },
        "text_config": {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.05,
            "bos_token_id": SPECIAL.index("<s>"),
            "eos_token_id": SPECIAL.index("</s>"),
            "pad_token_id": SPECIAL.index("<pad>"),
        },
        "pad_token_id": SPECIAL.index("<pad>"),
        "pad_to_multiple_of": 0,
        "empty_token_id": SPECIAL.index("\u2581"),
        "n_action_bins": ACTION_BINS,
        "chunk": CHUNK,
    }


def pi0_config() -> dict[str, Any]:
    attention = {"depth": 3, "num_heads": 4, "num_kv_heads": 1, "head_dim": 32}
    return {
        "paligemma": attention | {"width": 128, "mlp_dim": 256},
        "action_expert": attention | {"width": 96, "mlp_dim": 192},
        "vision": {
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": IMAGE,
            "patch_size": 16,
        },
        "vocab_size": VOCABULARY,
        "action_dim": 8,
        "action_horizon": 4,
        "bos_token_id": SPECIAL.index("<s>"),
    }


def smolvla_config(action_dim: int) -> dict[str, Any]:
    """The keys of lerobot's config.json that a reader needs, and its defaults."""
    return {
        "type": "smolvla",
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [len(STATE_LOW)]},
            "observation.images.base": {"type": "VISUAL", "shape": [3, IMAGE, IMAGE]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [action_dim]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "chunk_size": 4,
        "n_action_steps": 4,
        "max_state_dim": 8,
        "max_action_dim": 8,
        "resize_imgs_with_padding": [IMAGE, IMAGE],
        "tokenizer_max_length": 48,
        "num_steps": 10,
        "vlm_model_name": "tiny",
        "attention_mode": "cross_attn",
        "num_vlm_layers": 4,
        "num_expert_layers": -1,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
        "min_period": 4e-3,
        "max_period": 4.0,
    }


def smolvlm_config() -> dict[str, Any]:
    return {
        "model_type": "smolvlm",
        "text_config": {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
        },
        "vision_config": {
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": IMAGE,
            "patch_size": 8,
        },
        "scale_factor": 2,
    }


def gr00t_config() -> dict[str, Any]:
    """The keys of NVIDIA's config.json that a reader needs."""
    dit = {
        "num_layers": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 24,
        "cross_attention_dim": 128,
        "output_dim": 96,
    }
    vl = {
        "num_layers": 1,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "positional_embeddings": None,
    }
    return {
        "model_type": MODEL_TYPE,
        "backbone_cfg": {
            "eagle_path": "tiny",
            "project_to_dim": None,
            "reproject_vision": False,
            "select_layer": 3,
        },
        "action_head_cfg": {
            "action_dim": 8,
            "action_horizon": 4,
            "add_pos_embed": True,
            "backbone_embedding_dim": 128,
            "diffusion_model_cfg": dit
            | {
                "interleave_self_attention": True,
                "norm_type": "ada_norm",
                "positional_embeddings": None,
            },
            "hidden_size": 96,
            "input_embedding_dim": 96,
            "max_action_dim": 8,
            "max_num_embodiments": 32,
            "max_seq_len": 16,
            "max_state_dim": 8,
            "noise_beta_alpha": 1.5,
            "noise_beta_beta": 1.0,
            "noise_s": 0.999,
            "num_inference_timesteps": 4,
            "num_target_vision_tokens": 4,
            "num_timestep_buckets": 1000,
            "use_vlln": True,
            "vl_self_attention_cfg": vl,
        },
    }


def eagle_config() -> dict[str, Any]:
    return {
        "model_type": "eagle_2_5_vl",
        "text_config": smolvlm_config()["text_config"]
        | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        "vision_config": {
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": IMAGE,
            "patch_size": 16,
        },
        "use_pixel_shuffle": False,
        "downsample_ratio": 0.5,
        "mlp_connector_layers": 1,
    }


def tokenizer() -> Tokenizer:
    """Train a BPE tokenizer over ASCII on the word list inside the prompt."""
    result = Tokenizer(models.BPE(unk_token=SPECIAL[0], fuse_unk=True))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - ACTION_BINS,
        special_tokens=list(SPECIAL),
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    result.train_from_iterator(
        [PROMPT.format(instruction=word) for word in WORDS.split()] * 8, trainer
    )
    return result


def write_openvla(
    directory: Path, oft_plus: bool = False, action_dim: int = 4, patch_size: int = 16
) -> None:
    """Its statistics leave actions in [-1, 1] unchanged."""
    action = {"q01": [-1.0] * action_dim, "q99": [1.0] * action_dim, "mask": [True] * action_dim}
    statistics = {"maniskill": {"action": action, "proprio": {"q01": STATE_LOW, "q99": STATE_HIGH}}}
    _write(
        directory,
        openvla_config(patch_size) | (OFT_PLUS if oft_plus else {}),
        STATISTICS,
        statistics,
    )


def unit_statistics(action_dim: int) -> dict[str, dict[str, list[float]]]:
    """Of the state, and of actions that stay unchanged."""
    state = {
        "mean": [(a + b) / 2 for a, b in zip(STATE_LOW, STATE_HIGH, strict=True)],
        "std": [(b - a) / 2 for a, b in zip(STATE_LOW, STATE_HIGH, strict=True)],
        "q01": STATE_LOW,
        "q99": STATE_HIGH,
    }
    actions = {
        "mean": [0.0] * action_dim,
        "std": [1.0] * action_dim,
        "q01": [-1.0] * action_dim,
        "q99": [1.0] * action_dim,
    }
    return {"state": state, "actions": actions}


def write_pi0(directory: Path, action_dim: int = 4) -> None:
    """Its statistics leave actions unchanged."""
    _write(directory, pi0_config(), NORM_STATS, {"norm_stats": unit_statistics(action_dim)})


def write_smolvla(directory: Path, action_dim: int = 4) -> None:
    """Its statistics leave actions unchanged. They are where lerobot writes them since 0.4."""
    config = smolvla_config(action_dim)
    _write(directory, config, VLM_CONFIG, smolvlm_config())
    numbers = unit_statistics(action_dim)
    means = {
        name: {kind: values[kind] for kind in ("mean", "std")} for name, values in numbers.items()
    }
    write_processors(directory, config["normalization_mapping"], means)


def write_processors(
    directory: Path, modes: Mapping[str, str], statistics: Mapping[str, Mapping[str, list[float]]]
) -> None:
    """Write lerobot's normalisation files. ``modes``: how, by kind of feature."""
    for name, (file, step) in PROCESSORS.items():
        stem = file.removesuffix(".json")
        state_file = f"{stem}_step_0_{step}.safetensors"
        normalizer = {
            "registry_name": step,
            "config": {"eps": 1e-8, "norm_map": modes},
            "state_file": state_file,
        }
        (directory / file).write_text(
            json.dumps({"name": stem, "steps": [normalizer]}, indent=1) + "\n"
        )
        numbers = {
            f"{FEATURES[name]}.{kind}": torch.tensor(values)
            for kind, values in statistics[name].items()
        }
        write_safetensors(numbers, directory / state_file)


def write_gr00t(directory: Path, action_dim: int = 4) -> None:
    """Its statistics leave actions unchanged."""
    _write(directory, gr00t_config(), EAGLE_CONFIG, eagle_config())
    statistics = {
        "state": {"arm": {"min": STATE_LOW, "max": STATE_HIGH}},
        "action": {"arm": {"min": [-1.0] * action_dim, "max": [1.0] * action_dim}},
    }
    metadata = {"new_embodiment": {"statistics": statistics, "embodiment_tag": "new_embodiment"}}
    (directory / METADATA).parent.mkdir(exist_ok=True)
    (directory / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")


def _write(directory: Path, config: dict[str, Any], name: str, statistics: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file, document in ((CONFIG, config), (name, statistics)):
        (directory / file).write_text(json.dumps(document, indent=1) + "\n")
    tokenizer().save(str(directory / TOKENIZER), pretty=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("openvla", "openvla_oft_plus", "pi0", "smolvla", "gr00t"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--action-dim", type=int, default=4)
    parser.add_argument(
        "--patch-size", type=int, default=16, help="of OpenVLA's vision towers, in pixels"
    )
    given = parser.parse_args()
    if given.model in (
        writers := {"pi0": write_pi0, "smolvla": write_smolvla, "gr00t": write_gr00t}
    ):
        writers[given.model](given.directory, given.action_dim)
    else:
        write_openvla(
            given.directory, given.model == "openvla_oft_plus", given.action_dim, given.patch_size
        )
