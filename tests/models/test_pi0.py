from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.core.protocols import Noise, precompute_frozen
from rlinf_vla.core.types import ActionSample
from rlinf_vla.models.pi0.network import Pi0Network
from rlinf_vla.models.pi0.policy import Pi0Options, Pi0Policy
from rlinf_vla.testing.policy import PolicyConformance
from rlinf_vla.testing.policy_calls import act, gradients, observations, with_critic
from tests.models.frozen_part import assert_computed_once
from tests.models.tiny_openvla import ASSET, ASSETS
from tools.tiny_checkpoints import write_pi0

TINY = ASSETS / "pi0_tiny"


def directory(path: Path, pi05: bool = False) -> Path:
    """A checkpoint without weights: 32-pixel images, two layers, a horizon of four actions of six numbers."""
    gemma = {"depth": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8}
    vision = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    config = {
        "paligemma": gemma | {"width": 32, "mlp_dim": 48},
        "action_expert": gemma | {"width": 24, "mlp_dim": 32},
        "vision": vision,
        "vocab_size": 512,
        "action_dim": 6,
        "action_horizon": 4,
        "pi05": pi05,
        "bos_token_id": 1,
    }
    statistics = {
        name: {
            "mean": [0.1] * count,
            "std": [0.5] * count,
            "q01": [-1.0] * count,
            "q99": [1.0] * count,
        }
        for name, count in (("state", 5), ("actions", 4))
    }
    path.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ASSET / "tokenizer.json", path / "tokenizer.json")
    (path / "config.json").write_text(json.dumps(config))
    (path / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics}))
    return path


def test_the_packaged_asset_is_that_of_the_module(tmp_path: Path) -> None:
    write_pi0(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in TINY.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_text() == (TINY / path.name).read_text()


def small(path: Path, pi05: bool = False, **options: Any) -> Pi0Policy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {
            "denoise_steps": 3,
            "frozen_vlm": False,
            "prompt_length": 64 if pi05 else 32,
        } | options
        policy = Pi0Policy.load(directory(path, pi05), Pi0Options(random_weights=True, **options))
        for name, parameter in policy.backbone.named_parameters():
            if ".dense." in name:  # of adaRMS, whose gates are zero at first
                torch.nn.init.normal_(parameter, std=0.2)
        return policy


class SameForEachAction(Noise):
    """Gives each action of a chunk the same draw, as ``act_from_noise`` does."""

    def __init__(self, start: Tensor) -> None:
        self.start = start

    def uniform(self, *shape: int) -> Tensor:
        return torch.full((len(self.start), *shape), 0.5)

    def normal(self, *shape: int) -> Tensor:
        return self.start[:, None, None].expand(-1, *shape)


class Pi0(PolicyConformance):
    continuous = True
    state_numbers = 6
    greedy_is_likeliest = False
    options: dict[str, Any] = {}  # noqa: RUF012
    pi05 = False

    @pytest.fixture
    def policy(self, tmp_path: Path) -> Pi0Policy:
        return small(tmp_path / "small", self.pi05, **self.options)

    def reload(self, policy: Any, directory: Path) -> Pi0Policy:
        directory.mkdir()
        policy.save(directory)
        options = Pi0Options(**{**policy.options.__dict__, "random_weights": False})
        return Pi0Policy.load(directory, options)

    @torch.no_grad()
    def test_the_log_probability_detects_a_deterministic_chain(self, policy: Pi0Policy) -> None:
        """The mean log-probability of a Gaussian's samples is its negative entropy."""
        inputs = policy.prepare(observations(policy, 1))
        many = {name: value.expand(2048, *value.shape[1:]) for name, value in inputs.items()}
        sample = act(policy, many)
        found = policy.evaluate(many, sample.latent, 1.0)
        error = (sample.log_prob + found.entropy).double()
        assert (error.mean(0).abs() <= 5 * error.std(0) / len(error) ** 0.5 + 1e-5).all()

    @torch.no_grad()
    def test_greedily_it_follows_the_flow_from_drawn_noise(self, policy: Pi0Policy) -> None:
        """As openpi does, whatever the sampler; a low temperature tends to it."""
        inputs = policy.prepare(observations(policy, 3))
        features = policy.encode(inputs)
        drawn = SameForEachAction(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))
        found = policy.act(features, drawn, 0.0).actions
        torch.testing.assert_close(
            found, policy.act_from_noise(features, drawn.start), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(
            policy.act(features, drawn, 1e-4).actions, found, rtol=0, atol=1e-2
        )


class TestPi0(Pi0):
    def test_one_step_is_random(self, policy: Pi0Policy) -> None:
        inputs = policy.prepare(observations(policy, 64))
        latent = act(policy, inputs).latent
        assert set(latent["index"].tolist()) == {0, 1, 2}


@torch.no_grad()
def test_steering_starts_from_the_given_noise(tmp_path: Path) -> None:
    policy = small(tmp_path / "small", sampler="flow_noise")
    inputs = policy.prepare(observations(policy, 3))
    features = policy.encode(inputs)
    noise = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    x = noise[:, None].repeat(1, 4, 1)
    for time in (1.0, 2 / 3, 1 / 3):
        x = (
            x
            - policy.backbone.velocity(features.prefix, features.state, x, torch.full((3,), time))[
                0
            ]
            / 3
        )
    expected = policy.action_normalizer.inverse(x[:, :, :4])
    torch.testing.assert_close(policy.act_from_noise(features, noise), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        policy.act_from_noise(features, torch.zeros(3, 6)), policy.act(features, None, 0.0).actions
    )


class TestPi05(Pi0):
    pi05 = True


class TestPi0WholeChain(Pi0):
    options = {"sampler": "flow_sde_all", "value_on": "vlm", "delta_mask": [2, -2]}  # noqa: RUF012


class TestPi0FlowNoise(Pi0):
    options = {"sampler": "flow_noise", "chunk": 2}  # noqa: RUF012

    test_save_and_load = None  # type: ignore[assignment]  # a training checkpoint keeps the noise head; the model's own layout has no place for it


def test_a_frozen_vlm_is_not_trained(tmp_path: Path) -> None:
    policy = small(tmp_path / "small", frozen_vlm=True)
    inputs = policy.prepare(observations(policy, 2))
    policy.evaluate(inputs, act(policy, inputs).latent, 1.0).log_prob.sum().backward()
    learning = gradients(policy.backbone)
    assert learning and not any(".paligemma." in name for name in learning)


def test_the_output_layer_that_nothing_reads_is_not_trained(tmp_path: Path) -> None:
    policy = small(tmp_path / "small")
    again = Pi0().reload(policy, tmp_path / "again")
    for each in (policy, again):
        frozen = [name for name, weight in each.named_parameters() if not weight.requires_grad]
        assert frozen == ["backbone.paligemma_with_expert.gemma_expert.lm_head.weight"]


@pytest.mark.parametrize(
    "options",
    [{}, {"pi05": True}, {"value_on": "vlm", "sampler": "flow_sde_all"}, {"value_on": "both"}],
)
def test_the_frozen_part_is_computed_once_for_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    assert_computed_once(
        small(tmp_path / "small", frozen_vlm=True, **options), Pi0Network, "prefix", monkeypatch
    )


def test_a_critic_on_both_reads_what_each_of_the_others_reads(tmp_path: Path) -> None:
    found = {}
    for value_on in ("expert", "vlm", "both"):
        policy = small(tmp_path / value_on, value_on=value_on)
        found[value_on] = policy.pooled(policy.encode(policy.prepare(observations(policy, 3))))
        assert found[value_on].shape == (3, policy.pooled_width)
    assert torch.equal(found["both"], torch.cat([found["expert"], found["vlm"]], dim=1))


@pytest.mark.parametrize("value_on", ["expert", "vlm", "both"])
def test_a_detached_critic_trains_its_head_alone(tmp_path: Path, value_on: str) -> None:
    learning = {}
    for detached in (False, True):
        policy = with_critic(
            small(tmp_path / str(detached), value_on=value_on, detach_critic=detached)
        )
        inputs = policy.prepare(observations(policy, 2))
        policy.evaluate(inputs, act(policy, inputs).latent, 1.0).value.sum().backward()
        learning[detached] = (bool(gradients(policy.backbone)), bool(gradients(policy.value_head)))
    assert learning == {False: (True, True), True: (False, True)}


@torch.no_grad()
@pytest.mark.parametrize(
    ("sampler", "draws"), [("flow_sde", 1), ("flow_sde_all", 4), ("flow_noise", 4)]
)
def test_the_mean_over_a_chain_is_its_sum_over_the_draws(
    tmp_path: Path, sampler: str, draws: int
) -> None:
    found = {}
    for kind in ("sum", "mean"):
        policy = small(tmp_path / kind, sampler=sampler, chain_log_prob=kind)
        inputs = policy.prepare(observations(policy, 2))
        sample = act(policy, inputs)
        again = policy.evaluate(inputs, sample.latent, 1.0)
        found[kind] = (sample.log_prob, again.log_prob, again.entropy)
    for total, mean in zip(found["sum"], found["mean"], strict=True):
        torch.testing.assert_close(mean, total / draws)


def test_features_of_trained_parts_are_not_reused(tmp_path: Path) -> None:
    policy = small(tmp_path / "small", frozen_vlm=False)
    inputs = policy.prepare(observations(policy, 2))
    assert precompute_frozen(policy, inputs, rows=1) is inputs


def test_the_state_reaches_pi0_as_a_token_and_pi05_as_text(tmp_path: Path) -> None:
    for pi05 in (False, True):
        policy = small(tmp_path / str(pi05), pi05)
        observed = observations(policy, 2)
        inputs = policy.prepare(observed)
        observed.state[0] += 0.7
        changed = {
            name
            for name, value in policy.prepare(observed).items()
            if not torch.equal(value, inputs[name])
        }
        assert changed >= ({"state", "token_ids"} if pi05 else {"state"})
        first = act(policy, inputs).actions
        second = act(policy, policy.prepare(observed)).actions
        assert not torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 5}, "more than the model's horizon of 4"),
        ({"asset_id": "libero"}, "model.options.asset_id=libero"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(tmp_path / "small", **options)


@pytest.mark.parametrize(("name", "value"), [("sampler", "ddim"), ("value_on", "text")])
def test_unknown_option_values(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"model.options.{name}={value} is not known"):
        check_values(Pi0Options(**{name: value}), "model.options.")


def test_lerobot_names_and_the_tied_embedding_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    policy = small(tmp_path / "small")
    saved = directory(tmp_path / "saved")
    policy.save(saved)
    state = load_file(saved / "model.safetensors")
    tied = state.pop("paligemma_with_expert.paligemma.lm_head.weight")
    state["paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"] = tied
    save_file(
        {f"model.{name}": value for name, value in state.items()}, saved / "model.safetensors"
    )
    loaded = Pi0Policy.load(saved, Pi0Options(denoise_steps=3, frozen_vlm=False, prompt_length=32))
    inputs = policy.prepare(observations(policy, 2))
    found: ActionSample = act(loaded, inputs)
    expected: Tensor = act(policy, inputs).actions
    torch.testing.assert_close(found.actions, expected, rtol=0, atol=0.05)
