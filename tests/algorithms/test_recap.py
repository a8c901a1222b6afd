"""Policies that are told how good their actions are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.conditions import NEGATIVE, POSITIVE, told, untold
from rlinf_vla.algorithms.recap import (
    ConditionedPolicy,
    LabelledDemonstrationConfig,
    Recap,
    RecapConfig,
)
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Policy, RealTimeChunking
from rlinf_vla.testing.policy import PolicyConformance
from rlinf_vla.testing.policy_calls import noise, observations
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.models.test_compact import compact
from tests.models.test_pi0 import small as small_pi0

SEEDS = torch.arange(3)


def conditioned(base: Policy, **keys: Any) -> ConditionedPolicy:
    labelled = LabelledDemonstrationConfig(dataset="data")
    return Recap(RecapConfig(demonstrations=labelled, **keys)).wrap(base, 0)


def reading() -> Policy:
    return compact(reads_instruction=True)


class TestConditioned(PolicyConformance):
    test_its_options_fit_into_a_recipe = None  # it has those of the wrapped policy
    test_prepared_inputs_are_cheap_and_each_row_its_own = None
    continuous = True

    @pytest.fixture
    def policy(self) -> Policy:
        return conditioned(reading())

    def reload(self, policy: Policy, directory: Path) -> Policy:
        assert isinstance(policy, ConditionedPolicy)
        return conditioned(super().reload(policy.base, directory))


def test_a_text_is_added_once_and_removed() -> None:
    assert told("push") == "push" + POSITIVE and told("push", False) == "push" + NEGATIVE
    for text in ("push" + POSITIVE, "push" + NEGATIVE):
        assert told(text) == told(text, False) == text and untold(text) == "push"
    assert untold("push") == "push"


def test_it_acts_as_told_that_its_actions_are_good() -> None:
    base = reading()
    policy = conditioned(base)
    seen = observations(policy, 3)
    positive, negative = (
        replace(seen, instruction=[told(text, good) for text in seen.instruction])
        for good in (True, False)
    )

    def actions(acting: Policy, obs: Any) -> torch.Tensor:
        return acting.act(acting.encode(acting.prepare(obs)), noise(SEEDS), 1.0).actions

    assert torch.equal(actions(policy, seen), actions(base, positive))
    assert torch.equal(actions(policy, negative), actions(base, negative))
    assert not torch.equal(actions(base, positive), actions(base, negative))


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
def test_guidance_extrapolates_the_mean_action(guidance: float) -> None:
    base = reading()
    policy = conditioned(base, guidance=guidance)
    seen = observations(policy, 3)
    positive = replace(seen, instruction=[told(text) for text in seen.instruction])
    with_it, without = (
        base.act(base.encode(base.prepare(obs)), None, 0.0).latent["drawn"]
        for obs in (positive, seen)
    )
    found = policy.act(policy.encode(policy.prepare(seen)), None, 0.0).latent["drawn"]
    torch.testing.assert_close(found, without + guidance * (with_it - without))


def test_guidance_extrapolates_the_velocity_of_each_step(tmp_path: Path) -> None:
    base = small_pi0(tmp_path, denoise_steps=3)
    policy = conditioned(base, guidance=2.5)
    seen = observations(policy, 2)
    policy.fit_instructions(seen.instruction)
    positive = replace(seen, instruction=[told(text) for text in seen.instruction])
    with torch.no_grad():
        with_it, without = (base.encode(base.prepare(obs)) for obs in (positive, seen))
        x = torch.randn(2, base.noise_dim, generator=torch.Generator().manual_seed(0))
        start = x[:, None].expand(-1, base.horizon, -1)
        moved = start
        for time in (1.0, 2 / 3, 1 / 3):
            speeds = [
                base.backbone.velocity(each.prefix, each.state, moved, torch.full((2,), time))[0]
                for each in (with_it, without)
            ]
            moved = moved - (speeds[1] + 2.5 * (speeds[0] - speeds[1])) / 3
        found = base.act_from_noise(base.guided(with_it, without, 2.5), x)
        expected = base.action_normalizer.inverse(
            moved[:, : base.spec.chunk, : base.spec.action_dim]
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert isinstance(policy, RealTimeChunking) and not isinstance(
        conditioned(reading()), RealTimeChunking
    )


@pytest.mark.parametrize("dropout", [0.0, 0.4, 1.0])
def test_some_rows_are_not_told(dropout: float) -> None:
    base = LinearPolicy(LinearOptions(reads=True))
    policy = conditioned(base, condition_dropout=dropout)
    seen = observations(policy, 40)
    labelled = replace(
        seen,
        instruction=[told(text, row % 2 == 0) for row, text in enumerate(seen.instruction)],
    )
    actions = torch.zeros(40, base.horizon, base.spec.action_dim)
    seeds = torch.arange(40)
    found = policy.supervised_loss(policy.prepare(labelled), actions, noise(seeds))
    told_loss, untold_loss = (
        base.supervised_loss(base.prepare(obs), actions, noise(seeds)) for obs in (labelled, seen)
    )
    dropped = noise(seeds).uniform(1)[:, 0] < dropout
    assert int(dropped.sum()) == {0.0: 0, 1.0: 40}.get(dropout, int(dropped.sum()))
    assert torch.equal(found, torch.where(dropped, untold_loss, told_loss))
    assert (told_loss != untold_loss).all()


def test_what_cannot_learn_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"set model\.options\.reads_instruction=true"):
        conditioned(compact())
    with pytest.raises(
        UserError, match=r"labelled datasets: set algorithm\.demonstrations\.dataset"
    ):
        Recap(RecapConfig())
