"""Full fine-tuning of whole policies in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.sft import Demonstrations, imitation_loss
from rlinf_vla.core.protocols import Policy
from rlinf_vla.rollout.noise import imitation_noise
from rlinf_vla.testing.policy_calls import observations
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.trainer import Trainer
from tests.models.test_gr00t import small as small_gr00t
from tests.models.test_openvla_oft import small as small_oft
from tests.models.test_pi0 import small as small_pi0
from tests.models.test_smolvla import small as small_smolvla
from tests.models.tiny_openvla import smaller_directory, tiny

RATE = 5e-6
STEPS = 40
POLICIES: dict[str, Callable[[Path], Policy]] = {
    "openvla": lambda path: tiny(directory=smaller_directory(path), dtype="bfloat16"),
    "openvla_oft": lambda path: small_oft(path, {"dtype": "bfloat16"}),
    "pi0": lambda path: small_pi0(path, dtype="bfloat16"),
    "smolvla": lambda path: small_smolvla(path, dtype="bfloat16"),
    "gr00t": lambda path: small_gr00t(path, dtype="bfloat16"),
}
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=list(POLICIES))


def trainer(policy: Policy) -> Trainer:
    return Trainer(policy, OptimizerConfig(RATE, RATE, 1.0), 8)


def learn(subject: Trainer, steps: int) -> None:
    policy: Policy = subject.policy  # type: ignore[assignment]
    inputs = policy.prepare(observations(policy, 8))
    actions = 0.5 * torch.rand(
        8, policy.spec.chunk, policy.spec.action_dim, generator=torch.Generator().manual_seed(1)
    )
    shown = Demonstrations(inputs, actions, torch.arange(8))
    for _ in range(steps):
        subject.step(shown, partial(imitation_loss, noise=partial(imitation_noise, 0)))


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in policy.named_parameters()}


@every_policy
def test_every_weight_learns_at_a_rate_below_bfloat16_s_spacing(
    make: Callable[[Path], Policy], tmp_path: Path
) -> None:
    policy = make(tmp_path / "model")
    subject, start = trainer(policy), weights(policy)
    learn(subject, 1)
    first = weights(policy)
    low = [
        name
        for name in subject.low
        if (gradient := subject.trained[name].grad) is not None and gradient.any()
    ]
    assert len(low) > 20
    for name in low:
        assert not torch.equal(subject.trained[name], start[name].float()), (
            f"the master of {name} moves at once"
        )
    learn(subject, STEPS - 1)
    for name, before in start.items():
        after = policy.get_parameter(name)
        assert after.dtype == before.dtype
        if name in subject.low:
            assert torch.equal(after, subject.trained[name].bfloat16())
        # a norm's weights near 1 need 400 steps, and a bias of keys changes no attention
        if name in low and before.abs().median() < 0.2 and not name.endswith(".to_k.bias"):
            assert not torch.equal(after, before), name
    moved = [
        sum(int((now[name] != start[name]).sum()) for name in low)
        for now in (first, weights(policy))
    ]
    assert moved[1] > 4 * moved[0], "most steps are below the spacing, and add up"


@every_policy
def test_a_resumed_run_has_the_same_bits(make: Callable[[Path], Policy], tmp_path: Path) -> None:
    whole, parts = (make(tmp_path / name) for name in ("whole", "parts"))
    expected, begun = trainer(whole), trainer(parts)
    learn(expected, 4)
    learn(begun, 2)
    saved = save_checkpoint(tmp_path / "checkpoints", parts, begun, {"iteration": 2}, 1)
    resumed = make(tmp_path / "resumed")
    continued = trainer(resumed)
    assert load_checkpoint(saved, resumed, continued) == {"iteration": 2}
    learn(continued, 2)
    for found, wanted in (
        (weights(resumed), weights(whole)),
        (continued.state(), expected.state()),
    ):
        assert found.keys() == wanted.keys() and all(
            torch.equal(found[name], value) for name, value in wanted.items()
        )
