"""An actor acts at the temperature of its settings."""

from __future__ import annotations

import pytest
import torch

from rlinf_vla.core.types import Episodes
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.testing.policy_calls import observations
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_its_log_probabilities_equal_those_of_evaluate_at_that_temperature(
    temperature: float,
) -> None:
    policy = LinearPolicy(LinearOptions(chunk=2))
    inputs = policy.prepare(observations(policy, 200))
    episodes = Episodes.first_attempts(torch.zeros(200).long(), torch.arange(200))
    step = torch.zeros(200).long()
    sample = Actor(policy, Settings(0, temperature, 50)).act(inputs, episodes, step)
    again = policy.evaluate(inputs, sample.latent, temperature)
    torch.testing.assert_close(sample.log_prob, again.log_prob)
    surprise = -sample.log_prob.mean()
    entropy = again.entropy.mean()
    assert float(surprise) == pytest.approx(float(entropy), abs=0.06), (
        "it samples from that distribution"
    )


@torch.no_grad()
def test_at_temperature_zero_it_takes_the_likeliest() -> None:
    policy = LinearPolicy(LinearOptions(chunk=2))
    inputs = policy.prepare(observations(policy, 20))
    found = []
    for seed in (0, 100):
        episodes = Episodes.first_attempts(torch.zeros(20).long(), seed + torch.arange(20))
        found.append(
            Actor(policy, Settings(seed, 0.0, 5)).act(inputs, episodes, torch.zeros(20).long())
        )
    assert torch.equal(found[0].actions, found[1].actions)
    centres = policy.centres[None, None, None]
    for choice in range(len(policy.centres)):
        other = {"choice": torch.full_like(found[0].latent["choice"], choice)}
        assert (policy.evaluate(inputs, other, 1.0).log_prob <= found[0].log_prob + 1e-6).all()
    assert (found[0].actions[..., None] == centres).any(-1).all()
