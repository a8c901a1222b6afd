"""The numbers of docs/split.md: bytes sent for a split policy, and the trained share of the full weights.

Full-size networks are built on the meta device, where weights take no memory and a pass computes only shapes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Episodes
from rlinf_vla.features.planner import synthetic
from rlinf_vla.models.compact.options import CompactOptions
from rlinf_vla.models.compact.policy import CompactPolicy
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions, OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.rollout.actor import Settings, nbytes
from rlinf_vla.rollout.split import head_weights
from rlinf_vla.testing.policy_calls import observations, split
from rlinf_vla.training.lora import add_lora, network_dtype
from tests.models.tiny_openvla import ASSET, ASSETS
from tests.parity.test_manifests import manifest

LIBERO = {"state": 8, "action": 7}
CAMERAS = ["base", "wrist"]


def statistics(count: int) -> dict[str, Any]:
    return {
        "q01": [-1.0] * count,
        "q99": [1.0] * count,
        "mean": [0.0] * count,
        "std": [1.0] * count,
    }


def openvla(directory: Path) -> Path:
    """OpenVLA 7B as published, without weights, with LIBERO's dimensions."""
    config = manifest("openvla_7b_config_reconstructed.json")
    config["norm_stats"] = {
        "libero": {"action": statistics(LIBERO["action"]), "proprio": statistics(LIBERO["state"])}
    }
    return written(directory, {"config.json": config})


def pi0(directory: Path, pi05: bool = False) -> Path:
    norm_stats = {"state": statistics(LIBERO["state"]), "actions": statistics(LIBERO["action"])}
    return written(
        directory,
        {
            "config.json": {"pi05": pi05, "action_horizon": 50, "bos_token_id": 1},
            "norm_stats.json": {"norm_stats": norm_stats},
        },
    )


def written(directory: Path, documents: dict[str, Any]) -> Path:
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document))
    shutil.copyfile(ASSET / "tokenizer.json", directory / "tokenizer.json")
    return directory


def oft_7b(directory: Path, **options: Any) -> Policy:
    return OpenVLAOFTPolicy.without_weights(
        openvla(directory), OpenVLAOFTOptions(dtype="bfloat16", **options)
    )


def pi0_3b(directory: Path, **options: Any) -> Policy:
    return Pi0Policy.without_weights(
        pi0(directory), Pi0Options(images=CAMERAS, chunk=5, dtype="bfloat16", **options)
    )


def pi05_3b(directory: Path) -> Policy:
    options = Pi0Options(
        images=CAMERAS, chunk=5, prompt_length=200, value_on="vlm", dtype="bfloat16"
    )
    return Pi0Policy.without_weights(pi0(directory, pi05=True), options)


@pytest.mark.parametrize(
    ("make", "up", "down", "head", "trained_head"),
    [
        (oft_7b, 150_816, 458_752, 10_750_980, 2_163_457),
        (pi0_3b, 301_616, 10_324_656, 693_804_164, 17_699_617),
        (pi05_3b, 302_984, 13_128_520, 1_157_442_692, 17_141_537),
    ],
)
def test_bytes_of_a_split_full_size_policy(
    make: Any, up: int, down: int, head: int, trained_head: int, tmp_path: Path
) -> None:
    """In bfloat16, per environment: bytes of prepared inputs, of packed features, and of the head; trained numbers in it."""
    policy = make(tmp_path)
    inputs = policy.prepare(synthetic.observation(policy.spec, 1))
    policy.to("meta")
    with torch.no_grad():
        packed = policy.pack(
            policy.encode({name: value.to("meta") for name, value in inputs.items()})
        )
    assert (nbytes(inputs), nbytes(packed)) == (up, down)
    with torch.device("meta"):
        add_lora(policy, LoraOptions(), seed=0)
    trains = {
        name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad
    }
    assert nbytes(head_weights(policy, policy.state_dict())) == head
    assert sum(value.numel() for value in head_weights(policy, trains).values()) == trained_head


@pytest.mark.parametrize(
    ("model", "asset", "options", "up", "down"),
    [
        (
            OpenVLAOFTPolicy,
            "openvla_oft_tiny_pushcube",
            OpenVLAOFTOptions(prompt_length=26),
            12_522,
            8_192,
        ),
        (
            Pi0Policy,
            "pi0_tiny_pushcube",
            Pi0Options(prompt_length=16, denoise_steps=1),
            12_464,
            25_024,
        ),
        (CompactPolicy, "compact", CompactOptions(random_weights=True), 12_320, 512),
    ],
)
def test_bytes_of_a_split_tiny_policy(
    model: type[Policy], asset: str, options: Any, up: int, down: int
) -> None:
    """Measured: one call for eight environments."""
    policy = model.load(ASSETS / asset, options)
    actor = split(policy, model.without_weights(ASSETS / asset, options), Settings(0, 1.0, 8))
    rows = torch.arange(8)
    actor.act(policy.prepare(observations(policy, 8)), Episodes.first_attempts(rows, rows), rows)
    assert (actor.requests, actor.sent, actor.received) == (1, 8 * up, 8 * down)


def shares(make: Any, directory: Path, **lora: Any) -> tuple[float, float]:
    """Bytes published, of the bytes of a backbone in bfloat16: with ``rollout.rounded_weights``, and without."""
    policy = make(directory)
    whole = nbytes(dict(policy.backbone.named_parameters()))
    with torch.device("meta"):
        add_lora(policy, LoraOptions(**lora), seed=0)
    trains = {
        name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad
    }
    assert any(name.startswith("value_head.") for name in trains)
    return nbytes(
        {name: value.to(network_dtype(policy)) for name, value in trains.items()}
    ) / whole, nbytes(trains) / whole


def openvla_7b(directory: Path) -> Policy:
    return OpenVLAPolicy.without_weights(openvla(directory), OpenVLAOptions(dtype="bfloat16"))


BOUND = 0.015


@pytest.mark.parametrize(
    ("make", "share", "exact"),
    [
        pytest.param(openvla_7b, 0.01483, 0.02966, marks=pytest.mark.nightly),
        pytest.param(oft_7b, 0.01483, 0.02966, marks=pytest.mark.nightly),
        (pi0_3b, 0.00505, 0.01010),
        (pi05_3b, 0.00459, 0.00918),
    ],
)
def test_the_trained_share_of_the_full_weights_is_small(
    make: Any, share: float, exact: float, tmp_path: Path
) -> None:
    found = shares(make, tmp_path)
    assert LoraOptions().rank == 32
    assert found == pytest.approx((share, exact), abs=5e-6) and found[0] <= BOUND


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "lora", "share", "exact"),
    [
        (lambda path: oft_7b(path, proprio=True), {}, 0.01702, 0.03182),
        (lambda path: oft_7b(path, proprio=True), {"vision": False}, 0.01323, 0.02422),
        (lambda path: pi0_3b(path, frozen_vlm=False), {}, 0.01794, 0.03588),
    ],
)
def test_settings_with_a_larger_share(
    make: Any, lora: dict[str, Any], share: float, exact: float, tmp_path: Path
) -> None:
    """OFT's projector of proprioception, which trains in full; adapters in PaliGemma."""
    assert shares(make, tmp_path, **lora) == pytest.approx((share, exact), abs=5e-6)
