"""Data of the shape that a rollout has, without an environment: random pictures, and what a policy does about them."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_vla.algorithms.sac import ACTED, ACTION, DISCOUNT, REWARD
from rlinf_vla.algorithms.soft import CHOSEN
from rlinf_vla.protocols import Policy, PolicySpec
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.types import ActionSample, Episodes, Inputs, Observation, Trajectory

INSTRUCTION = "put the red cube on the plate"


def observation(spec: PolicySpec, batch: int, device: torch.device | str) -> Observation:
    """Pictures and states of the sizes that ``spec`` wants."""
    generator = torch.Generator().manual_seed(0)
    images = {
        name: torch.randint(0, 256, (batch, height, width, 3), generator=generator, dtype=torch.uint8).to(device)
        for name, (height, width) in spec.images.items()
    }
    return Observation(images, torch.randn(batch, spec.state_dim, generator=generator).to(device), [INSTRUCTION] * batch)


def calls(policy: Policy, count: int, settings: Settings, group_size: int) -> Trajectory:
    """``[N]`` policy calls, the first of an episode each, ``group_size`` attempts in a row at the same one; all actions were executed."""
    device = next(policy.parameters()).device
    number = torch.arange(count)
    zeros = torch.zeros_like(number)
    episodes = Episodes(task_id=zeros, seed=number // group_size, attempt=number % group_size)
    inputs, sample = _play(policy, count, settings, episodes)
    steps = torch.ones(count, policy.spec.chunk, dtype=torch.bool, device=device)
    reward = torch.randn(steps.shape, generator=torch.Generator().manual_seed(1)).to(device)
    return Trajectory(
        inputs=inputs,
        latent=sample.latent,
        log_prob=sample.log_prob,
        value=sample.value,
        bootstrap_value=torch.zeros_like(sample.value),
        cut=torch.zeros(count, dtype=torch.bool, device=device),
        reward=reward,
        terminated=~steps,
        truncated=~steps,
        success=~steps,
        valid=steps,
        task_id=zeros.to(device),
        seed=episodes.seed.to(device),
        attempt=episodes.attempt.to(device),
        step=zeros.to(device),
        policy_version=zeros.to(device),
    )


def records(policy: Policy, count: int, settings: Settings, gamma: float) -> dict[str, Tensor]:
    """``[L]`` records of a replay, one long episode; see ``rollout/transitions.py``."""
    number = torch.arange(count)
    zeros = torch.zeros_like(number)
    inputs, sample = _play(policy, count, settings, Episodes(zeros, number, zeros))
    reward = torch.randn(count, generator=torch.Generator().manual_seed(1))
    chunk = torch.full((count,), gamma**policy.spec.chunk)
    with torch.no_grad():
        rows = policy.fix(inputs)
    return rows | {ACTION: sample.latent[CHOSEN], REWARD: reward, DISCOUNT: chunk, ACTED: torch.ones(count, dtype=torch.bool)}


def _play(policy: Policy, count: int, settings: Settings, episodes: Episodes) -> tuple[Inputs, ActionSample]:
    device = next(policy.parameters()).device
    inputs = policy.prepare(observation(policy.spec, count, device))
    sample = Actor(policy, settings).act(inputs, episodes, torch.zeros(count, dtype=torch.int64))
    latent = {name: value.clone() for name, value in sample.latent.items()}  # an update cannot learn from tensors of inference mode
    return inputs, ActionSample(sample.actions.clone(), latent, sample.log_prob.clone(), sample.value.clone())
