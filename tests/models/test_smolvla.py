from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.smolvla.network import SmolVLANetwork
from rlinf_vla.models.smolvla.policy import SmolVLAOptions, SmolVLAPolicy
from rlinf_vla.testing.policy import PolicyConformance
from rlinf_vla.testing.policy_calls import act, gradients, observations
from tests.models.frozen_part import assert_computed_once
from tests.models.tiny_openvla import ASSETS
from tools.tiny_checkpoints import write_smolvla

TINY = ASSETS / "smolvla_tiny"
VLM = {
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "image_size": 32,
    },
}


def directory(path: Path, vlm: dict[str, Any] | None = None, **config: Any) -> Path:
    """A checkpoint without weights: 32-pixel images, two layers, a horizon of four actions of six numbers."""
    write_smolvla(path)
    sizes = {
        "num_vlm_layers": 2,
        "max_action_dim": 6,
        "resize_imgs_with_padding": [32, 32],
    } | config
    edit(path / "config.json", sizes)
    edit(path / "vlm_config.json", VLM if vlm is None else vlm)
    return path


def edit(path: Path, changes: dict[str, Any]) -> None:
    document = json.loads(path.read_text())
    for name, value in changes.items():
        document[name] = document[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(document))


def small(path: Path, **options: Any) -> SmolVLAPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"denoise_steps": 3, "frozen_vlm": False, "prompt_length": 32} | options
        return SmolVLAPolicy.load(directory(path), SmolVLAOptions(random_weights=True, **options))


class SmolVLA(PolicyConformance):
    continuous = True
    greedy_is_likeliest = False
    state_numbers = 8
    options: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture
    def policy(self, tmp_path: Path) -> SmolVLAPolicy:
        return small(tmp_path / "small", **self.options)

    def reload(self, policy: Any, directory: Path) -> SmolVLAPolicy:
        directory.mkdir()
        policy.save(directory)
        return SmolVLAPolicy.load(directory, replace(policy.options, random_weights=False))


class TestSmolVLA(SmolVLA):
    pass


class TestSmolVLAWholeChain(SmolVLA):
    options = {"sampler": "flow_sde_all", "value_on": "vlm", "chunk": 2}  # noqa: RUF012


class TestSmolVLAFlowNoise(SmolVLA):
    options = {"sampler": "flow_noise", "frozen_vlm": True}  # noqa: RUF012

    test_save_and_load = None  # type: ignore[assignment]  # a training checkpoint keeps the noise head; the model's own layout has no place for it


def test_the_packaged_asset_is_that_of_the_module(tmp_path: Path) -> None:
    write_smolvla(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in TINY.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (TINY / path.name).read_bytes()


@pytest.mark.parametrize("value_on", ["expert", "vlm"])
def test_a_frozen_vlm_is_computed_once_and_the_state_is_still_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value_on: str
) -> None:
    policy = small(tmp_path / "small", frozen_vlm=True, value_on=value_on)
    assert_computed_once(policy, SmolVLANetwork, "prefix", monkeypatch)
    learning = gradients(policy.backbone)
    assert (
        not any(".vlm." in name for name in learning)
        and {"state_proj.weight", "action_in_proj.weight"} <= learning.keys()
    )


def test_steering_starts_from_the_given_noise(tmp_path: Path) -> None:
    policy = small(tmp_path / "small", sampler="flow_noise")  # whose greedy steps are Euler steps
    with torch.no_grad():
        features = policy.encode(policy.prepare(observations(policy, 3)))
        greedy = policy.act(features, None, 0.0).actions
        assert policy.noise_dim == 6
        moved = policy.act_from_noise(features, torch.ones(3, 6))
    torch.testing.assert_close(policy.act_from_noise(features, torch.zeros(3, 6)), greedy)
    assert not torch.allclose(moved, greedy, atol=1e-2)


def test_other_names_of_the_same_weights_are_read(tmp_path: Path) -> None:
    """Of a compiled model, and of one whose output layer is tied to the embedding."""
    from safetensors.torch import load_file, save_file

    policy = small(tmp_path / "small")
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved, torch.float32)
    state = load_file(saved / "model.safetensors")
    assert all(name.startswith("model.") for name in state)
    del state["model.vlm_with_expert.vlm.lm_head.weight"]
    save_file(
        {name.replace("model.", "model._orig_mod.", 1): value for name, value in state.items()},
        saved / "model.safetensors",
    )
    loaded = SmolVLAPolicy.load(saved, replace(policy.options, random_weights=False))
    inputs = policy.prepare(observations(policy, 2))
    assert torch.equal(act(loaded, inputs).actions, act(policy, inputs).actions)


def test_a_checkpoint_without_statistics_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "small")
    for file in path.glob("policy_*.json"):
        document = json.loads(file.read_text())
        del document["steps"][0]["state_file"]
        file.write_text(json.dumps(document))
    with pytest.raises(UserError, match="has no statistics of its state, as lerobot's base models"):
        SmolVLAPolicy.load(path, SmolVLAOptions(random_weights=True))


@torch.no_grad()
def test_padding_of_the_prompt_changes_nothing(tmp_path: Path) -> None:
    short = small(tmp_path / "short", prompt_length=20)
    long = small(tmp_path / "long", prompt_length=60)
    seen = observations(short, 3)
    found = [act(policy, policy.prepare(seen)).actions for policy in (short, long)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_a_prompt_ends_with_one_new_line(tmp_path: Path) -> None:
    policy = small(tmp_path / "small")
    assert policy.ids("push it") == policy.ids("push it\n") != policy.ids("push it\n\n")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"type": "pi0"}, "type is 'pi0', not 'smolvla'"),
        ({"add_image_special_tokens": True}, "add_image_special_tokens=true is not supported"),
        ({"num_expert_layers": 1}, "num_expert_layers=1 is not supported, 2 is"),
        (
            {"resize_imgs_with_padding": [64, 64]},
            r"resize_imgs_with_padding=\[64, 64\] is not supported, \[32, 32\] is",
        ),
        ({"chunk_size": 0}, "chunk_size=0 is not valid"),
        ({"num_steps": None}, "num_steps=null is not valid"),
        ({"expert_width_multiplier": "wide"}, 'expert_width_multiplier="wide" is not valid'),
        ({"num_vlm_layers": "all"}, "no model can be built"),
    ],
)
def test_other_config_files_are_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    path = directory(tmp_path / "small", **config)
    with pytest.raises(UserError, match=words) as caught:
        SmolVLAPolicy.load(path, SmolVLAOptions(random_weights=True))
    assert "\n" not in str(caught.value)


def test_cameras_of_a_checkpoint_are_not_dropped_silently(tmp_path: Path) -> None:
    features = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 32, 32]}
        for name in ("base", "image2", "empty_camera_0")
    }
    path = directory(tmp_path / "two", input_features=features)
    edit(path / "config.json", {"empty_cameras": 1})
    with pytest.raises(
        UserError,
        match=r"was trained with observation\.images\.base, observation\.images\.image2: set model",
    ):
        SmolVLAPolicy.load(path, SmolVLAOptions(random_weights=True))
    assert (
        len(
            SmolVLAPolicy.load(
                path, SmolVLAOptions(random_weights=True, images=["base", "wrist"])
            ).spec.images
        )
        == 2
    )
    document = json.loads((path / "config.json").read_text())
    del document["input_features"]["observation.images.image2"]
    (path / "config.json").write_text(json.dumps(document))
    assert len(SmolVLAPolicy.load(path, SmolVLAOptions(random_weights=True)).spec.images) == 1


def test_sizes_of_an_unknown_language_model_are_asked_for(tmp_path: Path) -> None:
    path = directory(tmp_path / "small")
    (path / "vlm_config.json").unlink()
    with pytest.raises(
        UserError,
        match=r"vlm_model_name 'tiny' is not known: copy that model's config.json .* as vlm_config.json",
    ):
        SmolVLAPolicy.load(path, SmolVLAOptions(random_weights=True))


def test_the_published_sizes_have_450_million_weights(tmp_path: Path) -> None:
    """Those of lerobot/smolvla_base; its config.json was not seen here, lerobot's defaults are."""
    name = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    sizes = {
        "max_state_dim": 32,
        "max_action_dim": 32,
        "chunk_size": 50,
        "n_action_steps": 50,
        "num_vlm_layers": 16,
    }
    path = directory(
        tmp_path / "full", vlm_model_name=name, resize_imgs_with_padding=[512, 512], **sizes
    )
    (path / "vlm_config.json").unlink()
    policy = SmolVLAPolicy.without_weights(path, SmolVLAOptions())
    expert = sum(p.numel() for p in policy.backbone.vlm_with_expert.lm_expert.parameters())
    total = sum(p.numel() for p in policy.backbone.parameters())
    assert (round(total / 1e6), round(expert / 1e6)) == (450, 98)
