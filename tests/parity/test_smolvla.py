"""SmolVLA against lerobot 0.3.3; ``lerobot_smolvla.py`` made the fixtures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_vla.core.types import Observation
from rlinf_vla.models import flow
from rlinf_vla.models.flow_network import Prefix
from rlinf_vla.models.smolvla.network import SmolVLANetwork
from rlinf_vla.models.smolvla.policy import SmolVLAOptions, SmolVLAPolicy, resize_with_pad
from tests.models.tiny_openvla import ASSET

from .fixtures import Fixture
from .precision import Precision, agree, gradients_agree

TASKS = ["push the red cube to the target", "pull it\n"]


@pytest.fixture(scope="module", params=["smolvla_tiny", "smolvla_tiny_all"])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return Fixture(request.param)


def cameras(fixture: Fixture) -> list[str]:
    return [
        name
        for name, feature in fixture.config["input_features"].items()
        if feature["type"] == "VISUAL"
    ]


@pytest.fixture(scope="module")
def policy(fixture: Fixture, tmp_path_factory: pytest.TempPathFactory) -> SmolVLAPolicy:
    """Loaded from the directory that lerobot 0.3.3 would write."""
    directory = tmp_path_factory.mktemp("smolvla")
    for name in ("config.json", "vlm_config.json"):
        shutil.copyfile(fixture.path / name, directory / name)
    shutil.copyfile(ASSET / "tokenizer.json", directory / "tokenizer.json")
    save_file(
        {**fixture.weights, **load_file(fixture.path / "statistics.safetensors")},
        directory / "model.safetensors",
    )
    return SmolVLAPolicy.load(directory, SmolVLAOptions(images=cameras(fixture)))


@pytest.fixture(scope="module")
def network(policy: SmolVLAPolicy) -> SmolVLANetwork:
    return policy.backbone.requires_grad_(True)


def observation(fixture: Fixture) -> Observation:
    images = {name: fixture.inputs[name].permute(0, 2, 3, 1) for name in cameras(fixture)}
    return Observation(images, fixture.inputs["state"], list(TASKS))


def prefix_inputs(at: Precision, fixture: Fixture) -> tuple[Tensor, Tensor, Tensor]:
    images = torch.stack(
        [fixture.expected[f"pixels_{i}"] for i in range(len(cameras(fixture)))], dim=1
    )
    return at(images), fixture.expected["token_ids"], fixture.expected["token_mask"]


def prefix_of(at: Precision, fixture: Fixture, network: SmolVLANetwork) -> Prefix:
    return at(network).with_state(
        at(network).prefix(*prefix_inputs(at, fixture)), at(fixture.expected["state"])
    )


def test_prepared_inputs(fixture: Fixture, policy: SmolVLAPolicy) -> None:
    inputs = policy.prepare(observation(fixture))
    expected = fixture.expected
    width = expected["token_ids"].shape[1]
    assert (
        torch.equal(inputs["token_mask"][:, :width], expected["token_mask"])
        and not inputs["token_mask"][:, width:].any()
    )
    assert torch.equal(
        inputs["token_ids"][:, :width][expected["token_mask"]],
        expected["token_ids"][expected["token_mask"]],
    )

    def compute(at: Precision) -> dict[str, Tensor]:
        found = {
            f"pixels_{i}": resize_with_pad(inputs[f"image.{name}"], policy.spec.images[name])
            for i, name in enumerate(cameras(fixture))
        }
        return {"state": at(inputs["state"])} | found

    agree(compute, expected)


@torch.no_grad()
def test_prefix(fixture: Fixture, network: SmolVLANetwork) -> None:
    expected = fixture.expected
    count = len(expected["prefix_mask"][0]) - int(
        (~expected["prefix_mask"].any(0)).flip(0).cumprod(0).sum()
    )
    mask = expected["prefix_mask"][:, :count]  # lerobot pads behind the state to prefix_length
    kept = {
        "prefix_states": expected["prefix_states"][:, :count][mask],
        "prefix_embeds": expected["prefix_embeds"][:, : count - 1],
    }
    kept |= {
        name: expected[name][:, :count][mask] for name in ("key_0", "key_1", "value_0", "value_1")
    }

    def compute(at: Precision) -> dict[str, Tensor]:
        embeds, _ = at(network).embed_prefix(*prefix_inputs(at, fixture))
        prefix = prefix_of(at, fixture, network)
        assert torch.equal(prefix.mask, mask)
        found = {"prefix_embeds": embeds, "prefix_states": prefix.states[mask]}
        for layer in (0, 1):
            key, value = (each.transpose(1, 2)[mask] for each in prefix.keys_and_values[layer])
            found |= {f"key_{layer}": key, f"value_{layer}": value}
        return found

    agree(compute, kept)


@torch.no_grad()
def test_velocity(fixture: Fixture, network: SmolVLANetwork) -> None:
    def compute(at: Precision) -> dict[str, Tensor]:
        noise, time, state = (at(fixture.inputs[name]) for name in ("noise", "time", "state"))
        velocity, _ = at(network).velocity(prefix_of(at, fixture, network), state, noise, time)
        return {"suffix_embeds": at(network).embed_suffix(noise, time), "velocity": velocity}

    agree(compute, fixture.expected)


@torch.no_grad()
def test_denoising(fixture: Fixture, network: SmolVLANetwork) -> None:
    steps = fixture.config["num_steps"]

    def compute(at: Precision) -> dict[str, Tensor]:
        prefix = prefix_of(at, fixture, network)
        state = at(fixture.inputs["state"])
        x = at(fixture.inputs["noise"])
        for time in flow.times(steps):
            x = flow.ode_step(
                x, at(network).velocity(prefix, state, x, at(time).expand(len(x)))[0], steps
            )
        return {"denoised": x}

    agree(compute, fixture.expected)


@torch.no_grad()
def test_the_policy_from_an_observation_to_actions(fixture: Fixture, policy: SmolVLAPolicy) -> None:
    """The noise differs between actions, which ``act_from_noise`` does not allow: replay its steps."""
    features = policy.encode(policy.prepare(observation(fixture)))
    x = fixture.inputs["noise"]
    steps = policy.options.denoise_steps
    assert steps == fixture.config["num_steps"]
    for time in flow.times(steps):
        x = flow.ode_step(
            x,
            policy.backbone.velocity(features.prefix, features.state, x, time.expand(len(x)))[0],
            steps,
        )
    found = policy.action_normalizer.inverse(x[:, :, :4])
    torch.testing.assert_close(found, fixture.expected["actions"], rtol=0, atol=2e-4)


def test_loss_and_gradients(
    fixture: Fixture, policy: SmolVLAPolicy, network: SmolVLANetwork
) -> None:
    inputs = fixture.inputs
    norms = fixture.json("grad_norms.json")
    normalized = policy.action_normalizer(inputs["actions"])
    target = torch.nn.functional.pad(
        normalized, (0, inputs["noise"].shape[-1] - normalized.shape[-1])
    )

    def forward(at: Precision) -> dict[str, Tensor]:
        noise, time, state = (at(inputs[name]) for name in ("noise", "time", "state"))
        x, velocity = flow.interpolate(at(target), noise, time)
        found, _ = at(network).velocity(prefix_of(at, fixture, network), state, x, time)
        return {
            "losses": (found - velocity) ** 2,
            "loss": flow.matching_loss(found, velocity, time).mean(),
        }

    def gradients(at: Precision) -> dict[str, Tensor]:
        named = dict(at(network).named_parameters())
        wanted = [named[name.removeprefix("model.")] for name in norms]
        return dict(
            zip(
                norms,
                torch.autograd.grad(forward(at)["loss"], wanted, materialize_grads=True),
                strict=True,
            )
        )

    agree(forward, fixture.expected)
    gradients_agree(gradients, norms)


def test_everything_was_compared(fixture: Fixture) -> None:
    assert fixture.expected.keys() == fixture.expected.used


def test_a_saved_directory_has_the_files_and_names_of_lerobot(
    policy: SmolVLAPolicy, fixture: Fixture, tmp_path: Path
) -> None:
    policy.save(tmp_path, torch.float32)
    written = load_file(tmp_path / "model.safetensors")
    given = load_file(policy.directory / "model.safetensors")
    assert written.keys() == given.keys() and all(
        torch.equal(written[name], value) for name, value in given.items()
    )
    assert json.loads((tmp_path / "config.json").read_text()) == fixture.config
