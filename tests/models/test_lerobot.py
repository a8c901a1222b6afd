"""π₀ and π₀.₅ in lerobot's layout: its keys of config.json, its statistics and its names of weights.

Small random models stand for the published ones. Their files follow lerobot's source; no original
was seen here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_vla.config.errors import UserError
from rlinf_vla.models.normalizer import Normalizer
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.testing.policy_calls import act, observations
from tests.models import test_pi0

STATE = {
    "observation.state.mean": torch.tensor([0.5, -0.5, 0.0, 1.0, 2.0]),
    "observation.state.std": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
    "observation.state.q01": torch.full((5,), -2.0),
    "observation.state.q99": torch.full((5,), 3.0),
    "observation.state.count": torch.tensor([100.0]),
}
ACTION = {
    "action.mean": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    "action.std": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "action.min": torch.full((4,), -1.0),
    "action.max": torch.full((4,), 1.0),
}
MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
OLD = {
    "paligemma_with_expert.paligemma.model.language_model.": "paligemma_with_expert.paligemma.language_model.model.",
    "paligemma_with_expert.paligemma.lm_head.": "paligemma_with_expert.paligemma.language_model.lm_head.",
    "paligemma_with_expert.paligemma.model.vision_tower.": "paligemma_with_expert.paligemma.vision_tower.",
    "paligemma_with_expert.paligemma.model.multi_modal_projector.": "paligemma_with_expert.paligemma.multi_modal_projector.",
}
"""Names of today -> those of transformers before 4.52, with which lerobot/pi0 was first published."""


def step(name: str, modes: dict[str, str], file: str | None) -> dict[str, Any]:
    config = {"eps": 1e-8, "features": {}, "norm_map": modes}
    return {"registry_name": name, "config": config} | (
        {} if file is None else {"state_file": file}
    )


def directory(
    path: Path,
    pi05: bool = False,
    modes: dict[str, str] | None = None,
    base: bool = False,
    **config: Any,
) -> Path:
    """As lerobot saves one since 2025-09, with the sizes of ``test_pi0``."""
    policy = test_pi0.small(path.with_name("source"), pi05)
    path.mkdir()
    policy.save(path)
    (path / "norm_stats.json").unlink()
    document = json.loads((path / "config.json").read_text())
    sizes = {
        key: document[key]
        for key in ("paligemma", "action_expert", "vision", "vocab_size", "bos_token_id")
    }
    lerobot = {
        "type": "pi05" if pi05 else "pi0",
        "chunk_size": 4,
        "n_action_steps": 3,
        "max_state_dim": 6,
        "max_action_dim": 6,
    }
    (path / "config.json").write_text(
        json.dumps(sizes | lerobot | {"normalization_mapping": MODES} | config)
    )
    files = {
        "policy_preprocessor.json": (
            "normalizer_processor",
            "policy_preprocessor_step_2_normalizer_processor.safetensors",
        ),
        "policy_postprocessor.json": (
            "unnormalizer_processor",
            "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
        ),
    }
    for name, (kind, file) in files.items():
        others = [
            {"registry_name": "rename_observations_processor", "config": {}},
            {"registry_name": "device_processor", "config": {}},
        ]
        steps = [others[0], step(kind, modes or MODES, None if base else file), others[1]]
        (path / name).write_text(json.dumps({"name": name.removesuffix(".json"), "steps": steps}))
        if not base:
            save_file(STATE | ACTION, path / file)
    state = load_file(path / "model.safetensors")
    save_file({f"model.{name}": value for name, value in state.items()}, path / "model.safetensors")
    return path


def load(path: Path, **options: Any) -> Pi0Policy:
    return Pi0Policy.load(
        path, Pi0Options(denoise_steps=3, frozen_vlm=False, prompt_length=200, **options)
    )


@pytest.mark.parametrize("pi05", [False, True])
def test_a_directory_is_read_with_its_own_statistics(tmp_path: Path, pi05: bool) -> None:
    policy = load(directory(tmp_path / "lerobot", pi05))
    assert (policy.config.horizon, policy.config.action_dim, policy.config.pi05) == (4, 6, pi05)
    assert (policy.spec.chunk, policy.spec.action_dim, policy.spec.state_dim) == (3, 4, 5), (
        "n_action_steps of config.json"
    )
    state = torch.tensor([[0.6, -0.1, 0.3, 0.2, 2.5]])
    torch.testing.assert_close(
        policy.state_normalizer(state),
        torch.tensor([[1.0, 2.0, 1.0, -2.0, 1.0]]),
        rtol=0,
        atol=1e-6,
    )
    torch.testing.assert_close(
        policy.action_normalizer.inverse(torch.ones(1, 4)), torch.tensor([[1.1, 2.2, 3.3, 4.4]])
    )


def test_the_processors_decide_on_the_mode_not_the_kind_of_model(tmp_path: Path) -> None:
    policy = load(
        directory(
            tmp_path / "lerobot", pi05=True, modes={"STATE": "QUANTILES", "ACTION": "MIN_MAX"}
        )
    )
    torch.testing.assert_close(policy.state_normalizer(torch.full((1, 5), 0.5)), torch.zeros(1, 5))
    torch.testing.assert_close(
        policy.action_normalizer.inverse(torch.full((1, 4), 0.25)), torch.full((1, 4), 0.25)
    )
    plain = load(directory(tmp_path / "plain", modes={"STATE": "IDENTITY"}))
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert plain.state_limit is None
    assert torch.equal(plain.state_normalizer(values), values) and torch.equal(
        plain.action_normalizer.inverse(values[:, :4]), values[:, :4]
    )


def test_a_saved_copy_needs_no_file_of_lerobot(tmp_path: Path) -> None:
    policy = load(directory(tmp_path / "lerobot"))
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    assert {path.name for path in saved.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    again = load(saved)
    assert again.spec == policy.spec
    inputs = policy.prepare(observations(policy, 2))
    torch.testing.assert_close(
        act(again, inputs).actions, act(policy, inputs).actions, rtol=0, atol=0
    )


def test_statistics_among_the_weights_and_old_names_are_read(tmp_path: Path) -> None:
    path = directory(tmp_path / "lerobot")
    expected = load(path)
    for file in path.glob("policy_*"):
        file.unlink()
    state = {}
    for name, value in load_file(path / "model.safetensors").items():
        name = name.removeprefix("model.")
        before = next((today for today in OLD if name.startswith(today)), None)
        state["model." + (name if before is None else OLD[before] + name.removeprefix(before))] = (
            value
        )
    for name in ("mean", "std"):
        state[f"normalize_inputs.buffer_observation_state.{name}"] = STATE[
            f"observation.state.{name}"
        ]
        for kind in ("normalize_targets", "unnormalize_outputs"):
            state[f"{kind}.buffer_action.{name}"] = ACTION[f"action.{name}"].clone()
    save_file(state, path / "model.safetensors")
    policy = load(path)
    inputs = expected.prepare(observations(expected, 2))
    assert all(
        torch.equal(value, policy.prepare(observations(expected, 2))[name])
        for name, value in inputs.items()
    )
    assert torch.equal(act(policy, inputs).actions, act(expected, inputs).actions)


def test_a_base_model_without_statistics_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "lerobot", base=True)
    with pytest.raises(
        UserError,
        match=r"has no statistics of its state, as lerobot's base models: choose .* norm_stats.json",
    ) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    statistics = {"mean": [0.0] * 5, "std": [1.0] * 5, "q01": [-1.0] * 5, "q99": [1.0] * 5}
    (path / "norm_stats.json").write_text(
        json.dumps({"norm_stats": {"state": statistics, "actions": statistics}})
    )
    policy = load(path)
    assert not policy.action_normalizer.to_range, "openpi's way: mean and standard deviation for π₀"
    assert policy.spec.remarks[-1] == "statistics: norm_stats.json, not the processors beside it"


def test_statistics_that_were_never_set_are_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "lerobot", base=True)
    for file in path.glob("policy_*"):
        file.unlink()
    unset = {
        f"normalize_inputs.buffer_observation_state.{name}": torch.full((5,), float("inf"))
        for name in ("mean", "std")
    }
    save_file(load_file(path / "model.safetensors") | unset, path / "model.safetensors")
    with pytest.raises(UserError, match="has no statistics of its state"):
        load(path)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], r"policy_preprocessor.json has 0 steps normalizer_processor, one is expected"),
        (
            [step("normalizer_processor", MODES, "../x")],
            r"state_file=\.\./x is not the name of a file there",
        ),
        (
            [step("normalizer_processor", MODES, "gone.safetensors")],
            r"gone.safetensors cannot be read",
        ),
        (
            [step("normalizer_processor", {"STATE": "MEDIAN"}, "some.safetensors")],
            "normalisation MEDIAN is not known",
        ),
        (
            [step("normalizer_processor", {"STATE": "MIN_MAX"}, "some.safetensors")],
            "MIN_MAX of state needs min and max, .* lack min and max",
        ),
    ],
)
def test_damaged_processors_are_refused_in_one_line(
    tmp_path: Path, steps: list[Any], words: str
) -> None:
    path = directory(tmp_path / "lerobot")
    (path / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    save_file(STATE, path / "some.safetensors")
    with pytest.raises(UserError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_relative_actions_are_those_of_config_json(tmp_path: Path) -> None:
    names = {"use_relative_actions": True, "relative_exclude_joints": ["gripper"]}
    path = directory(
        tmp_path / "lerobot",
        **names,
        action_feature_names=["x.pos", "y.pos", "z.pos", "gripper.pos"],
    )
    assert load(path).delta == [0, 1, 2]
    for i, (mine, absolute, delta) in enumerate(
        (
            (["j1", "j2", "j3", "kRightGripper"], ["GRIPPER"], [0, 1, 2]),
            (["j1", "gripper"], ["gripper"], [0, 2, 3]),
            (["j1", "j2", "j3", "gripper", "gripper", "j6"], ["gripper", ""], [0, 1, 2]),
            (["j1", "j2", "j3", "gripper"], [""], [0, 1, 2, 3]),
            (None, [], [0, 1, 2, 3]),
        )
    ):
        saved = directory(
            tmp_path / str(i),
            use_relative_actions=True,
            action_feature_names=mine,
            relative_exclude_joints=absolute,
        )
        assert load(saved).delta == delta, "as lerobot compares names"
    with pytest.raises(
        UserError, match="use_relative_actions is set without action_feature_names: add delta_mask"
    ):
        load(directory(tmp_path / "unnamed", **names))


def test_delays_that_lerobot_trained_with_are_known(tmp_path: Path) -> None:
    assert load(directory(tmp_path / "trained", rtc_training_max_delay=2)).simulated_delay == 2
    assert load(directory(tmp_path / "plain", rtc_training_max_delay=0)).simulated_delay == 0
    assert (
        load(
            directory(tmp_path / "asked", rtc_training_max_delay=2), simulated_delay=1
        ).simulated_delay
        == 1
    )


def test_keys_that_change_the_computation_are_used(tmp_path: Path) -> None:
    plain = load(directory(tmp_path / "plain"))
    inputs = plain.prepare(observations(plain, 1))
    for name, value in (("min_period", 1.0), ("max_period", 8.0)):
        other = load(directory(tmp_path / name, **{name: value}))
        assert getattr(other.config, name) == value and not torch.equal(
            act(other, inputs, 0.0).actions, act(plain, inputs, 0.0).actions
        )
    three = Pi0Policy.load(directory(tmp_path / "steps", num_inference_steps=3), Pi0Options())
    assert (
        three.options.denoise_steps == 3
        and Pi0Policy.load(tmp_path / "plain", Pi0Options()).options.denoise_steps == 10
    )
    assert (
        Pi0Policy.load(tmp_path / "steps", Pi0Options(denoise_steps=4)).options.denoise_steps == 4
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha=true is not supported, false is"),
        (
            {"use_delta_joint_actions_aloha": True},
            "use_delta_joint_actions_aloha=true is not supported",
        ),
        ({"n_obs_steps": 6}, "n_obs_steps=6 is not supported, 1 is"),
        ({"min_period": 0}, "min_period=0 is not valid"),
        ({"image_resolution": [448, 448]}, r"image_resolution=\[448, 448\] is not supported"),
        (
            {"normalization_mapping": {"VISUAL": "MEAN_STD"}},
            'normalization_mapping.VISUAL="MEAN_STD" is not supported',
        ),
        (
            {"output_features": {"action": {"shape": [5]}}},
            r"action has shape \[5\], and max_action_dim=6, but the statistics have 4",
        ),
        ({"max_state_dim": 3}, "max_state_dim=3, but the statistics have 5 numbers"),
    ],
)
def test_keys_that_are_not_supported_are_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load(directory(tmp_path / "lerobot", **config))
    assert "\n" not in str(caught.value)


def test_cameras_of_a_checkpoint_are_not_dropped_silently(tmp_path: Path) -> None:
    names = ("top", "left", "empty_camera_0")
    seen = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 224, 224]} for name in names
    }
    path = directory(tmp_path / "three", input_features=seen, empty_cameras=1)
    with pytest.raises(
        UserError,
        match=r"was trained with observation\.images\.top, observation\.images\.left: set model\.options\.images",
    ):
        load(path)
    assert list(load(path, images=["base", "wrist"]).spec.images) == ["base", "wrist"]
    del seen["observation.images.left"]
    assert (
        len(load(directory(tmp_path / "one", input_features=seen, empty_cameras=1)).spec.images)
        == 1
    )


def test_steps_of_processors_are_done_or_said(tmp_path: Path) -> None:
    path = directory(tmp_path / "lerobot")
    assert not [line for line in load(path).spec.remarks if "processors" in line]
    document = json.loads((path / "policy_preprocessor.json").read_text())
    document["steps"] += [{"registry_name": "blur_processor", "config": {}}]
    (path / "policy_preprocessor.json").write_text(json.dumps(document))
    assert (
        load(path).spec.remarks[-1]
        == "the processors have steps that are not known and are left out: blur_processor"
    )
    document["steps"] += [
        {"registry_name": "relative_actions_processor", "config": {"enabled": True}}
    ]
    (path / "policy_preprocessor.json").write_text(json.dumps(document))
    with pytest.raises(
        UserError,
        match=r"relative_actions_processor is not as use_relative_actions of config\.json says",
    ):
        load(path)


@pytest.mark.parametrize("memory", ["use_visual_memory", "use_proprioceptive_memory"])
def test_a_policy_with_a_memory_is_refused(tmp_path: Path, memory: str) -> None:
    assert load(directory(tmp_path / "without", **{memory: False})).spec.chunk
    with pytest.raises(UserError, match=f"{memory}=true is not supported, false is"):
        load(directory(tmp_path / "with", **{memory: True}))


def test_the_state_in_the_prompt_can_be_padded(tmp_path: Path) -> None:
    """lerobot padded before it put the state into bins; 128 is that of 0."""
    policy = load(directory(tmp_path / "lerobot", pi05=True), prompt_state_dim=8)
    (text,) = policy.prompts.texts("push", torch.tensor([0.0, 0.5, -1.0, 1.0, 0.99]))
    assert text == "Task: push, State: 128 192 0 255 254 128 128 128;\nAction: "
    unpadded = load(tmp_path / "lerobot")
    assert unpadded.prompts.texts("push", torch.zeros(5)) == [
        "Task: push, State: 128 128 128 128 128;\nAction: "
    ]


def test_a_constant_number_is_not_divided_by_zero() -> None:
    still = {"q01": [1.0, 0.0], "q99": [1.0, 2.0]}
    found = Normalizer(still, "QUANTILES", 1e-8)(torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0]))
