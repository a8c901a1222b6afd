"""The compact policy, alone and wrapped by SAC."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.sac import SAC, SACConfig, SACPolicy
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Policy
from rlinf_vla.models.compact.encoder import ImageEncoder
from rlinf_vla.models.compact.options import CompactOptions
from rlinf_vla.models.compact.policy import CompactPolicy
from rlinf_vla.testing.policy import PolicyConformance
from rlinf_vla.testing.policy_calls import observations
from tests.models.tiny_openvla import ASSETS


def compact(**options: object) -> CompactPolicy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CompactPolicy.load(
            ASSETS / "compact", CompactOptions(random_weights=True, **options)
        )  # type: ignore[arg-type]


class TestCompactPolicy(PolicyConformance):
    continuous = True

    @pytest.fixture
    def policy(self) -> Policy:
        return compact()


class TestReading(PolicyConformance):
    """It reads the instruction, too."""

    continuous = True

    @pytest.fixture
    def policy(self) -> Policy:
        return compact(reads_instruction=True)


class TestWithoutImages(PolicyConformance):
    """It acts on the state alone."""

    continuous = True

    @pytest.fixture
    def policy(self) -> Policy:
        return compact(images=[])

    def reload(self, policy: Policy, directory: Path) -> Policy:
        """The images are no part of a checkpoint."""
        directory.mkdir()
        policy.save(directory)
        return CompactPolicy.load(directory, CompactOptions(images=[]))


class TestSoftPolicy(PolicyConformance):
    test_its_options_fit_into_a_recipe = None  # it has those of the wrapped policy
    continuous = True
    greedy_is_likeliest = False

    @pytest.fixture
    def policy(self) -> Policy:
        return SAC(SACConfig()).wrap(compact(), 0)

    def reload(self, policy: Policy, directory: Path) -> Policy:
        assert isinstance(policy, SACPolicy)
        directory.mkdir()
        policy.save(directory)
        again = SAC(SACConfig()).wrap(CompactPolicy.load(directory, CompactOptions()), 0)
        heads = {
            name: value
            for name, value in policy.state_dict().items()
            if name.startswith(("actor", "critics", "value_head"))
        }
        again.load_state_dict(heads, strict=False)
        return again


SMALL = {"image_sizes": [16, 16], "width": 8, "patch": 4, "channels": [8, 8]}


def test_distances_are_seen_up_to_two_metres() -> None:
    encoder = ImageEncoder(SMALL, "conv").eval()

    def seen(millimetres: int) -> Tensor:
        return encoder(torch.full((1, 16, 16, 1), millimetres, dtype=torch.int16))

    assert not torch.equal(seen(400), seen(500))
    assert torch.equal(seen(2000), seen(3000))
    grey = torch.full((1, 16, 16, 3), 255, dtype=torch.uint8)
    torch.testing.assert_close(seen(2000), encoder(grey))


def test_an_invalid_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="choose conv or timm:NAME"):
        compact(encoder="mlp")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        UserError, match="timm is not installed; it brings the torchvision that matches your torch"
    ):
        compact(encoder="timm:resnet10t")


def test_the_replay_of_a_frozen_backbone_stores_features() -> None:
    policy = SAC(SACConfig(frozen_backbone=True)).wrap(compact(), 0)
    learns = {
        name.split(".")[0]
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad
    }
    assert policy.frozen and learns == {
        "value_head",
        "actor",
        "log_alpha",
        "feature_mean",
        "feature_spread",
    }
    inputs = policy.prepare(observations(policy, 3))
    fixed = policy.precompute(inputs)
    assert list(fixed) == ["features"] and torch.equal(
        policy.encode(fixed).pooled, policy.encode(inputs).pooled
    )
