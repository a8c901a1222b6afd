from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.protocols import Policy
from rlinf_vla.testing.policy_calls import act, observations, with_critic
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.gradient_checkpointing import checkpoint_blocks
from rlinf_vla.training.lora import add_lora
from tests.models.test_gr00t import small as small_gr00t
from tests.models.test_openvla_oft import small as small_oft
from tests.models.test_pi0 import small as small_pi0
from tests.models.test_smolvla import small as small_smolvla
from tests.models.tiny_openvla import tiny

POLICIES: dict[str, Callable[[Path], Policy]] = {
    "openvla": lambda path: tiny(),
    "openvla_oft": lambda path: small_oft(path, film=True),
    "pi0": small_pi0,
    "pi0_frozen": lambda path: small_pi0(path, frozen_vlm=True),
    "pi05": lambda path: small_pi0(path, pi05=True),
    "smolvla": small_smolvla,
    "smolvla_frozen": lambda path: small_smolvla(path, frozen_vlm=True),
    "gr00t": small_gr00t,
    "gr00t_frozen": lambda path: small_gr00t(path, frozen_vlm=True),
}


def update(policy: Policy) -> tuple[Tensor, dict[str, Tensor], int]:
    """Log-probabilities, gradients, and the bytes kept for the backward pass (without weights)."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = with_critic(policy).prepare(observations(policy, 4))
    latent = act(policy, inputs).latent
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = policy.evaluate(inputs, latent, 1.0)
        waiting = sum(kept.values())
        (found.log_prob.sum() + found.value.sum()).backward()
    return (
        found.log_prob.detach(),
        {name: p.grad for name, p in policy.named_parameters() if p.grad is not None},
        waiting,
    )


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", list(POLICIES))
def test_less_memory_for_the_same_gradients(tmp_path: Path, name: str, rank: int) -> None:
    policies = [POLICIES[name](tmp_path / "model") for _ in range(2)]
    for policy in policies:
        add_lora(policy, LoraOptions(rank=rank), 0)
    checkpoint_blocks(policies[1])
    names = [set(policy.state_dict()) for policy in policies]
    assert names[0] == names[1]
    (log_prob, gradients, waiting), (again, recomputed, less) = (
        update(policy) for policy in policies
    )
    assert torch.equal(again, log_prob)
    assert recomputed.keys() == gradients.keys() and len(gradients) > 10
    for key, gradient in gradients.items():
        assert torch.equal(recomputed[key], gradient), key
    assert less < 0.5 * waiting


def test_a_backbone_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"cluster\.gradient_checkpointing=true: linear"):
        checkpoint_blocks(LinearPolicy(LinearOptions()))
