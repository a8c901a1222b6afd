"""Every key of a checkpoint's config.json is read, has no effect for a known reason, is refused, or is listed in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.config_keys import TRANSFORMERS, Only, Table, Use, check_keys
from rlinf_vla.models.gr00t import keys as gr00t
from rlinf_vla.models.openvla.keys import KEYS, OFT_KEYS, TEXT
from rlinf_vla.models.pi0 import lerobot as pi0
from rlinf_vla.models.smolvla import checkpoint as smolvla
from tests import stand_ins
from tests.models.tiny_openvla import ASSETS

MODELS = Path(__file__).parents[2] / "models"
FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
PATH = Path("somewhere/config.json")
FEATURES = {
    "input_features": {"observation.state": {"type": "STATE", "shape": [8]}},
    "output_features": {"action": {"shape": [7]}},
}
LEROBOT: dict[str, Any] = {
    "n_obs_steps": 1,
    "device": "cuda",
    "use_amp": False,
    "use_peft": False,
    "push_to_hub": True,
    "repo_id": None,
    "private": None,
    "tags": None,
    "license": None,
    "pretrained_path": None,
    "pretrained_revision": None,
    "chunk_size": 50,
    "n_action_steps": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "empty_cameras": 0,
    "rtc_config": None,
    "compile_model": False,
    "compile_mode": "default",
    "optimizer_lr": 1e-4,
    "optimizer_betas": [0.9, 0.95],
    "optimizer_eps": 1e-8,
    "optimizer_weight_decay": 0.01,
    "optimizer_grad_clip_norm": 1.0,
    "scheduler_warmup_steps": 1,
    "scheduler_decay_steps": 9,
    "scheduler_decay_lr": 1e-6,
    "freeze_vision_encoder": False,
    "train_expert_only": False,
    "min_period": 4e-3,
    "max_period": 4.0,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    **FEATURES,
}
"""lerobot 7427f318: configs/policies.py, and what its three configurations have in common."""
PI0 = LEROBOT | {
    "type": "pi0",
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "bfloat16",
    "num_inference_steps": 10,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "image_resolution": [224, 224],
    "tokenizer_max_length": 48,
    "gradient_checkpointing": True,
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
    "action_feature_names": None,
    "optimizer_fused": False,
    "text_tokenizer_name": "google/paligemma-3b-pt-224",
    "rtc_training_max_delay": 0,
}
OFFICIAL: dict[str, tuple[Table, Any]] = {
    "pi0": (pi0.table_of(PI0, 224), PI0),
    "pi0 of 2025": (
        pi0.table_of(PI0, 224),
        LEROBOT
        | {
            "type": "pi0",
            "resize_imgs_with_padding": [224, 224],
            "adapt_to_pi_aloha": False,
            "use_delta_joint_actions_aloha": False,
        }
        | {
            "proj_width": 1024,
            "num_steps": 10,
            "use_cache": True,
            "attention_implementation": "eager",
            "train_state_proj": True,
        },
    ),
    "pi05": (
        pi0.table_of(PI0, 224),
        PI0
        | {
            "type": "pi05",
            "use_visual_memory": False,
            "use_proprioceptive_memory": False,
            "memory_frames": 6,
            "memory_stride": 30,
        }
        | {"memory_temporal_attention_every": 4},
    ),
    "openpi": (
        pi0.table_of({}, 224),
        {
            "action_dim": 32,
            "action_horizon": 50,
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
        }
        | {"precision": "bfloat16"},
    ),
    "smolvla": (
        smolvla.TABLE,
        json.loads((FIXTURES / "smolvla_tiny" / "config.json").read_text())
        | {"fine_tune_vision_encoder": False}
        | LEROBOT,
    ),
    "gr00t": (gr00t.KEYS, json.loads((FIXTURES / "gr00t_tiny" / "config.json").read_text())),
    "openvla": (
        KEYS,
        json.loads((FIXTURES / "manifests" / "openvla_7b_config_reconstructed.json").read_text()),
    ),
    "openvla of transformers": (
        KEYS,
        {
            name: v
            for name, v in json.loads(
                (FIXTURES / "openvla_tiny" / "config.json").read_text()
            ).items()
            if name != "oracle_vit"
        },
    ),
}
"""Official configurations, with the keys that their programs write."""
OURS = {
    "pi0_tiny": pi0.OPENPI,
    "openvla_7b": KEYS,
    "openvla_oft_plus_tiny": OFT_KEYS,
    "smolvla_tiny": smolvla.TABLE,
    "gr00t_tiny": gr00t.KEYS,
}


@pytest.mark.parametrize("layout", list(OFFICIAL))
def test_every_key_of_an_official_configuration_is_known(layout: str) -> None:
    table, document = OFFICIAL[layout]
    assert check_keys(document, table, PATH) == []
    assert [name for name in document if name not in table] == []


@pytest.mark.parametrize("asset", list(OURS))
def test_every_key_of_our_own_files_is_known(asset: str) -> None:
    assert (
        check_keys(json.loads((ASSETS / asset / "config.json").read_text()), OURS[asset], PATH)
        == []
    )


def test_every_key_of_the_stand_ins_is_known() -> None:
    kinds = {
        stand_in.kind: name
        for name, stand_in in stand_ins.STAND_INS.items()
        if stand_in.kind not in ("adapter", "tokenizer")
    }
    assert len(kinds) >= 8
    for kind, name in kinds.items():
        document = json.loads(stand_ins.files(name)["config.json"])
        table = (
            OFT_KEYS
            if kind.startswith("openvla")
            else pi0.table_of(document, document.get("vision", {}).get("image_size", 224))
        )
        assert check_keys(document, table, PATH) == [], name


@pytest.mark.parametrize("layout", list(OFFICIAL))
def test_another_key_is_listed_once_at_any_depth(layout: str) -> None:
    table, document = OFFICIAL[layout]
    nested = {
        name: value | {"new_key": 1}
        for name, value in document.items()
        if isinstance(table[name], Mapping) and value
    }
    (line,) = check_keys(document | nested | {"brand_new\x1b": True}, table, PATH)
    assert (
        line.startswith("config.json has keys that are not known and have no effect: ")
        and r"brand_new\x1b" in line
    )
    assert all(f"{name}.new_key" in line for name in nested)


def test_the_line_fits_into_a_message_however_many_keys_there_are() -> None:
    (line,) = check_keys({f"key_{i}": i for i in range(5000)}, KEYS, PATH)
    assert len(line) < 300 and line.endswith(" ...")


def limited(table: Table, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Only]]:
    for name, use in table.items():
        if isinstance(use, Only):
            yield (*prefix, name), use
        elif isinstance(use, Mapping):
            yield from limited(use, (*prefix, name))


@pytest.mark.parametrize("layout", list(OFFICIAL))
def test_a_value_that_is_not_supported_is_refused(layout: str) -> None:
    table, document = OFFICIAL[layout]
    for (*above, name), use in limited(table):
        for value in ({"other": 1}, "other", None, float("nan"), 2.5, [1, 2], not use.values[0]):
            if use.allows(value):
                continue
            changed = json.loads(json.dumps(document))
            node = changed
            for part in above:
                node = node.setdefault(part, {})
            node[name] = value
            with pytest.raises(
                UserError,
                match=f"{'.'.join([*above, name])}=.* is not supported, .* is: choose another",
            ) as caught:
                check_keys(changed, table, PATH)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def read_keys(table: Table) -> Iterator[str]:
    for name, use in table.items():
        if use is Use.READ:
            yield name
        elif isinstance(use, Mapping) and use is not TEXT:
            yield from read_keys(use)


@pytest.mark.parametrize(
    ("family", "table"),
    [
        ("openvla", OFT_KEYS),
        ("pi0", OFFICIAL["pi05"][0]),
        ("smolvla", smolvla.TABLE),
        ("gr00t", gr00t.KEYS),
    ],
)
def test_what_is_said_to_be_read_is_read(family: str, table: Table) -> None:
    code = "".join(
        path.read_text()
        for path in (*MODELS.glob("*.py"), *(MODELS / family).glob("*.py"))
        if path.stem != "keys"
    )
    assert [
        name
        for name in read_keys(table)
        if f'"{name}"' not in code and not name.endswith("_variant")
    ] == []


def test_the_text_model_s_keys_are_those_of_transformers() -> None:
    from transformers import LlamaConfig

    known = {*LlamaConfig().to_dict(), "rope_theta", "rope_scaling"}
    assert {name for name, use in TEXT.items() if use is Use.READ} <= known
    assert known - TEXT.keys() == set()
    assert not any(use in (Use.READ, Use.SHAPE) for use in TRANSFORMERS.values())
