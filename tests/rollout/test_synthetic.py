"""Synthetic data has the format of rollouts, so that an update treats both equally."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from rlinf_vla.algorithms.advantages import chunk_rewards
from rlinf_vla.algorithms.grpo import GRPO, GRPOConfig
from rlinf_vla.algorithms.parity import parity_errors
from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.features.planner import synthetic
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import collect
from rlinf_vla.rollout.episodes import training_episodes
from rlinf_vla.rollout.transitions import record_transitions
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

SETTINGS = Settings(run_seed=1, temperature=1.0, batch_size=3)


def test_calls_look_like_collected_ones() -> None:
    policy = LinearPolicy(LinearOptions(chunk=3))
    real = collect(Actor(policy, SETTINGS), groups(6, 2), 0, 0, 5, Timeline()).flatten()
    made = synthetic.calls(policy, 12, SETTINGS, group_size=4)
    assert len(made) == 12
    for field in (each for each in fields(made) if each.name not in ("reference", "cost", "fault")):
        first, second = (getattr(each, field.name) for each in (made, real))
        pairs = (
            [(first[name], second[name]) for name in second]
            if isinstance(second, dict)
            else [(first, second)]
        )
        for ours, theirs in pairs:
            assert (ours.shape[1:], ours.dtype) == (theirs.shape[1:], theirs.dtype), field.name
            assert not ours.is_inference()


def test_calls_are_the_policys_own() -> None:
    policy = LinearPolicy(LinearOptions(chunk=3))
    made = synthetic.calls(policy, 12, SETTINGS, group_size=4)
    assert parity_errors(policy, made, 1.0).max() < 1e-6
    assert len(made.latent["choice"].unique(dim=0)) > 6, "their noise differs"
    again = synthetic.calls(policy, 12, replace(SETTINGS, batch_size=12), group_size=4)
    assert torch.equal(made.latent["choice"], again.latent["choice"])


def test_groups_are_attempts_at_one_episode() -> None:
    made = synthetic.calls(LinearPolicy(LinearOptions(chunk=3)), 12, SETTINGS, group_size=4)
    assert (
        torch.bincount(made.group_ids()).tolist() == [4, 4, 4]
        and len(made.episode_ids().unique()) == 12
    )
    assert GRPO(GRPOConfig(episodes=12, group_size=4), 1.0).informative(made).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_records_look_like_collected_ones(frozen: bool) -> None:
    policy = SAC(SACConfig(critics=3, hidden=8)).wrap(LinearPolicy(LinearOptions(chunk=2)), 0)
    if not frozen:  # the linear policy's features have no weights: a policy that trains its encoder keeps the images
        policy.backbone["logits"].weight.requires_grad_(True)
    else:
        policy.backbone.requires_grad_(False)
    episodes = training_episodes(0, 0, torch.arange(2), torch.zeros(2, dtype=torch.int64), 1)
    rewards = partial(chunk_rewards, gamma=0.9)
    real = record_transitions(
        policy, Actor(policy, SETTINGS), groups(2, 1), episodes, rewards, False, Timeline()
    )[0].records
    made = synthetic.records(policy, 10, SETTINGS, 0.9)
    assert {name: (value.shape[1:], value.dtype) for name, value in made.items()} == {
        name: (value.shape[1:], value.dtype) for name, value in real.items()
    }
    assert (
        made["acted"].all()
        and torch.allclose(made["discount"], torch.tensor(0.81))
        and not any(v.is_inference() for v in made.values())
    )
