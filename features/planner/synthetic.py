"""Make rollout and replay data without an environment: random images, a policy's real outputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlinf_vla.algorithms.feature_policy import ACTOR_OUTPUT
from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.images import noise
from rlinf_vla.core.protocols import Policy, PolicySpec
from rlinf_vla.core.transitions import ACTED, ACTION, COST, DISCOUNT, REWARD
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation, Trajectory
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.runtime import builders

STILL = {"learning_rate": 0.0, "value_learning_rate": 0.0, "target_kl": None, "sft_coef": 0.0}
"""Settings under which the weights do not change, so that every plan and repeat does the same work.
``sft_coef`` is 0 because the expert's demonstrations need a simulator."""
INSTRUCTION = "put the red cube on the plate"


def observation(spec: PolicySpec, batch: int) -> Observation:
    """Return random images and states of the sizes in ``spec``, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    images = noise(spec.images, batch, generator)
    return Observation(
        images, torch.randn(batch, spec.state_dim, generator=generator), [INSTRUCTION] * batch
    )


def calls(policy: Policy, count: int, settings: Settings, group_size: int) -> Trajectory:
    """Return ``[N]`` policy calls, each the first of its episode; all actions were executed.

    ``group_size`` consecutive calls are attempts at the same episode.
    """
    number = torch.arange(count)
    episodes = Episodes(
        torch.zeros_like(number), seed=number // group_size, attempt=number % group_size
    )
    inputs, sample = _play(policy, count, settings, episodes)
    return stored(moved(inputs, CPU), sample, episodes)


def stored(inputs: Inputs, sample: ActionSample, episodes: Episodes) -> Trajectory:
    """Return the first calls of ``episodes`` as a rollout stores them, on their device."""
    zeros = torch.zeros_like(episodes.seed)
    steps = torch.ones(sample.log_prob.shape[:2], dtype=torch.bool, device=zeros.device)
    reward = torch.randn(steps.shape, generator=torch.Generator().manual_seed(1)).to(zeros.device)
    return Trajectory(
        inputs=inputs,
        latent=sample.latent,
        log_prob=sample.log_prob,
        value=sample.value,
        bootstrap_value=torch.zeros_like(sample.value),
        cut=torch.zeros_like(zeros, dtype=torch.bool),
        reward=reward,
        terminated=~steps,
        truncated=~steps,
        success=~steps,
        valid=steps,
        task_id=episodes.task_id,
        seed=episodes.seed,
        attempt=episodes.attempt,
        step=zeros,
        policy_version=zeros,
        cost=torch.zeros_like(reward),
        fault=torch.zeros_like(steps, dtype=torch.uint8),
    )


def records(policy: Policy, count: int, settings: Settings, gamma: float) -> dict[str, Tensor]:
    """Return ``[L]`` replay records, one long episode; see ``rollout/transitions.py``."""
    number = torch.arange(count)
    zeros = torch.zeros_like(number)
    inputs, sample = _play(policy, count, settings, Episodes(zeros, number, zeros))
    reward = torch.randn(count, generator=torch.Generator().manual_seed(1))
    chunk = torch.full((count,), gamma**policy.spec.chunk)
    with torch.no_grad():
        rows = moved(policy.precompute(inputs), CPU)
    acted = torch.ones(count, dtype=torch.bool)
    cost = torch.zeros(count)
    return rows | {
        ACTION: sample.latent[ACTOR_OUTPUT],
        REWARD: reward,
        DISCOUNT: chunk,
        ACTED: acted,
        COST: cost,
    }


def _play(
    policy: Policy, count: int, settings: Settings, episodes: Episodes
) -> tuple[Inputs, ActionSample]:
    actor = Actor(policy, settings)
    inputs = actor.prepare(observation(policy.spec, count))
    sample = actor.act(inputs, episodes, torch.zeros(count, dtype=torch.int64))
    latent = {
        name: value.clone() for name, value in sample.latent.items()
    }  # updates cannot use inference-mode tensors
    return inputs, ActionSample(
        sample.actions.clone(), latent, sample.log_prob.clone(), sample.value.clone()
    )


def with_frozen_weights(recipe: Recipe) -> Recipe:
    """Return the recipe with updates that do not change the weights."""
    return replace(
        recipe,
        algorithm=replace(
            recipe.algorithm, **{k: v for k, v in STILL.items() if hasattr(recipe.algorithm, k)}
        ),
    )


def synthetic_batch(recipe: Recipe, policy: Policy, algorithm: OnPolicy, count: int) -> Batch:
    """Return a batch of ``count`` policy calls on random images."""
    config = recipe.algorithm
    settings = builders.actor_settings(recipe, recipe.rollout.temperature)
    sample = calls(policy, count, settings, getattr(config, "group_size", 1))
    advantage, target = torch.randn(2, len(sample), generator=torch.Generator().manual_seed(2))
    if config.kl_coef:
        sample = replace(sample, reference=sample.log_prob)
    batch = algorithm.weighted(sample, advantage)
    return replace(batch, target=target) if algorithm.value_coef else batch
