"""What a policy computes once per update, where a part of its network is frozen."""

from __future__ import annotations

import pytest
import torch

from rlinf_vla.core.protocols import Policy, precompute_frozen
from rlinf_vla.testing.policy_calls import act, gradients, observations, with_critic


def assert_computed_once(
    policy: Policy, network: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs on what was kept find the same numbers and gradients, without the ``method`` of ``network``."""
    inputs = with_critic(policy).prepare(observations(policy, 5))
    latent = act(policy, inputs).latent
    expected = policy.evaluate(inputs, latent, 1.0)
    (expected.log_prob.sum() + expected.value.sum()).backward()
    gradient = gradients(policy)
    policy.zero_grad()
    kept = precompute_frozen(policy, inputs, rows=2)
    assert all(len(value) == 5 and not value.requires_grad for value in kept.values())
    read = getattr(policy.options, "value_on", None) != "expert"  # type: ignore[union-attr]
    assert "prefix.keys" not in kept or ("prefix.states" in kept) == read, (
        "the critic alone reads the states"
    )
    monkeypatch.delattr(network, method)
    for _epoch in range(2):
        policy.zero_grad()
        found = policy.evaluate(kept, latent, 1.0)
        torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.value, expected.value, rtol=0, atol=1e-5)
        (found.log_prob.sum() + found.value.sum()).backward()
        again = gradients(policy)
        assert again.keys() == gradient.keys()
        for name, value in gradient.items():
            torch.testing.assert_close(again[name], value, rtol=1e-4, atol=1e-5)
