"""GR00T N1.5 against NVIDIA's code as lerobot 0.4.4 has it; ``lerobot_gr00t.py`` made the fixtures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.models import flow
from rlinf_vla.models.flow_network import Prefix
from rlinf_vla.models.gr00t.checkpoint import METADATA
from rlinf_vla.models.gr00t.network import GR00TNetwork
from rlinf_vla.models.gr00t.policy import GR00TOptions, GR00TPolicy, cropped
from tests.models.tiny_openvla import ASSET

from .fixtures import Fixture
from .precision import Precision, agree, gradients_agree

TASKS = ["push the red cube to the target", "pull it"]
PROJECTOR = 2
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module", params=["gr00t_tiny", "gr00t_tiny_shuffle"])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return Fixture(request.param)


@pytest.fixture(scope="module")
def policy(fixture: Fixture, tmp_path_factory: pytest.TempPathFactory) -> GR00TPolicy:
    """Loaded from the directory that NVIDIA's code would write, in two shards."""
    directory = tmp_path_factory.mktemp("gr00t")
    (directory / METADATA).parent.mkdir()
    for name, target in (
        ("config.json", "config.json"),
        ("eagle_config.json", "eagle_config.json"),
        ("metadata.json", METADATA),
    ):
        shutil.copyfile(fixture.path / name, directory / target)
    shutil.copyfile(ASSET / "tokenizer.json", directory / "tokenizer.json")
    names = sorted(fixture.weights)
    for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        save_file({name: fixture.weights[name] for name in part}, directory / shard)
    places = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    options = GR00TOptions(
        images=[f"camera_{i}" for i in range(cameras(fixture))], projector=PROJECTOR, crop=1.0
    )
    return GR00TPolicy.load(directory, options)


@pytest.fixture(scope="module")
def network(policy: GR00TPolicy) -> GR00TNetwork:
    return policy.backbone.requires_grad_(True)


def cameras(fixture: Fixture) -> int:
    return fixture.inputs["images"].shape[1]


def observation(fixture: Fixture) -> Observation:
    images = {f"camera_{i}": fixture.inputs["images"][:, i] for i in range(cameras(fixture))}
    return Observation(images, fixture.inputs["state"], list(TASKS))


def encoded(
    at: Precision, fixture: Fixture, policy: GR00TPolicy, network: GR00TNetwork, inputs: Inputs
) -> Prefix:
    """Of both rows, padded; the official code encoded each by itself."""
    before = policy.opening_ids.expand(len(TASKS), -1)
    ids = torch.cat([before, inputs["token_ids"]], dim=1)
    mask = torch.cat([torch.ones_like(before, dtype=torch.bool), inputs["token_mask"]], dim=1)
    return at(network).prefix(at(fixture.expected["pixels"]), ids, policy.image_places, mask)


def refined(at: Precision, fixture: Fixture, policy: GR00TPolicy, network: GR00TNetwork) -> Prefix:
    return at(network).refined(
        encoded(at, fixture, policy, network, policy.prepare(observation(fixture)))
    )


def test_prepared_inputs(fixture: Fixture, policy: GR00TPolicy) -> None:
    inputs = policy.prepare(observation(fixture))
    for row, mask in enumerate(inputs["token_mask"]):
        found = torch.cat([policy.opening_ids, inputs["token_ids"][row][mask]])
        assert torch.equal(found, fixture.expected[f"token_ids_{row}"])

    def compute(at: Precision) -> dict[str, Tensor]:
        images = [
            cropped(inputs[f"image.{name}"], size, policy.options.crop)
            for name, size in policy.spec.images.items()
        ]
        target = F.pad(
            policy.action_normalizer(at(fixture.inputs["actions"])),
            (0, policy.noise_dim - policy.spec.action_dim),
        )
        state = policy.state_normalizer(at(fixture.inputs["state"]))
        state = F.pad(state, (0, policy.config.state_dim - state.shape[1]))
        return {"pixels": at(torch.stack(images, dim=1)), "state": state, "target": target}

    agree(compute, fixture.expected)


@torch.no_grad()
def test_features_of_images_and_text(
    fixture: Fixture, policy: GR00TPolicy, network: GR00TNetwork
) -> None:
    inputs = policy.prepare(observation(fixture))

    def compute(at: Precision) -> dict[str, Tensor]:
        prefix = encoded(at, fixture, policy, network, inputs)
        after = at(network).refined(prefix)
        found = {
            f"features_{row}": prefix.states[row][mask] for row, mask in enumerate(prefix.mask)
        }
        return found | {
            f"refined_{row}": after.states[row][mask] for row, mask in enumerate(prefix.mask)
        }

    agree(compute, fixture.expected)


@torch.no_grad()
def test_denoising(fixture: Fixture, policy: GR00TPolicy, network: GR00TNetwork) -> None:
    """GR00T's time runs from noise to action, and its velocity is the negative of ours."""
    steps = fixture.config["action_head_cfg"]["num_inference_timesteps"]
    assert policy.options.denoise_steps == steps

    def compute(at: Precision) -> dict[str, Tensor]:
        prefix = refined(at, fixture, policy, network)
        state = at(fixture.expected["state"])
        x = at(fixture.inputs["noise"])
        for time in flow.times(steps):
            x = flow.ode_step(
                x, at(network).velocity(prefix, state, x, at(time).expand(len(x)))[0], steps
            )
        return {"denoised": x, "actions": policy.action_normalizer.inverse(x[..., :4])}

    agree(compute, fixture.expected)


@torch.no_grad()
def test_the_policy_from_an_observation_to_actions(fixture: Fixture, policy: GR00TPolicy) -> None:
    features = policy.encode(policy.prepare(observation(fixture)))
    x = fixture.inputs["noise"]
    steps = policy.options.denoise_steps
    assert steps is not None
    for time in flow.times(steps):
        x = flow.ode_step(
            x,
            policy.backbone.velocity(features.prefix, features.state, x, time.expand(len(x)))[0],
            steps,
        )
    expected = fixture.expected["actions"]
    torch.testing.assert_close(
        policy.action_normalizer.inverse(x[..., :4]),
        expected,
        rtol=0,
        atol=1e-4 * float(expected.abs().max()),
    )


def test_loss_and_gradients(fixture: Fixture, policy: GR00TPolicy, network: GR00TNetwork) -> None:
    inputs = fixture.inputs
    norms = fixture.json("grad_norms.json")

    def forward(at: Precision) -> dict[str, Tensor]:
        noise = at(inputs["noise"])
        state = at(fixture.expected["state"])
        target = at(fixture.expected["target"])
        x, wanted = flow.interpolate(target, noise, 1 - at(inputs["time"]))
        found, _ = at(network).velocity(
            refined(at, fixture, policy, network), state, x, 1 - at(inputs["time"])
        )
        count = policy.spec.action_dim
        losses = flow.matching_loss(found[..., :count], wanted[..., :count], at(inputs["time"]))
        return {"velocity": -found, "loss": losses}

    def gradients(at: Precision) -> dict[str, Tensor]:
        named = dict(at(network).named_parameters())
        found = torch.autograd.grad(
            forward(at)["loss"].mean(), [named[name] for name in norms], materialize_grads=True
        )
        return dict(zip(norms, found, strict=True))

    agree(forward, fixture.expected)
    gradients_agree(gradients, norms)


def test_everything_was_compared(fixture: Fixture) -> None:
    assert fixture.expected.keys() == fixture.expected.used


def test_a_saved_directory_has_the_files_and_names_of_nvidia(
    policy: GR00TPolicy, fixture: Fixture, tmp_path: Path
) -> None:
    """Other embodiments' projectors and unused layers are those that were loaded."""
    policy.save(tmp_path, torch.float32)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == fixture.weights.keys()
    assert all(torch.equal(written[name], value) for name, value in fixture.weights.items())
    assert json.loads((tmp_path / "config.json").read_text()) == fixture.config
    assert (tmp_path / METADATA).read_bytes() == (policy.directory / METADATA).read_bytes()
