"""Wrap environments in what a recipe adds to them: a training reward, limits and a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlinf_vla.config.recipe import DeadlineConfig, LimitsConfig, Recipe, RewardConfig
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import EnvSpec, VectorEnv

if TYPE_CHECKING:
    from rlinf_vla.rollout.reward_shaping import RewardShaper


def rewarded(recipe: Recipe, groups: Sequence[VectorEnv], chunk: int) -> Sequence[VectorEnv]:
    """Return the environments with the recipe's training reward, and its limits and deadline for a
    policy with chunks of ``chunk`` actions. Raises UserError."""
    if recipe.reward == RewardConfig():
        return timed(recipe, groups, chunk)
    from rlinf_vla.rollout.faults import GuardedEnv
    from rlinf_vla.rollout.reward_shaping import RewardedEnv

    reward_shaper = build_reward_shaper(recipe, groups[0].spec)
    scored = [GuardedEnv(RewardedEnv(env, reward_shaper)) for env in _limited(recipe, groups)]
    return _delayed(recipe, scored, chunk)


def timed(recipe: Recipe, groups: Sequence[VectorEnv], chunk: int) -> Sequence[VectorEnv]:
    """Return the environments with the recipe's limits and deadline. Raises UserError."""
    return _delayed(recipe, _limited(recipe, groups), chunk)


def _limited(recipe: Recipe, groups: Sequence[VectorEnv]) -> Sequence[VectorEnv]:
    if recipe.rollout.limits == LimitsConfig():
        return groups
    from rlinf_vla.rollout.safety_limits import LimitedEnv

    return [LimitedEnv(env, recipe.rollout.limits) for env in groups]


def _delayed(recipe: Recipe, groups: Sequence[VectorEnv], chunk: int) -> Sequence[VectorEnv]:
    config = recipe.rollout.deadline
    if config == DeadlineConfig():
        return groups
    from rlinf_vla.rollout.deadline import DeadlineEnv, deadline_of

    deadline = deadline_of(config, chunk, groups[0].spec.control_hz)
    return (
        groups if deadline is None else [DeadlineEnv(env, deadline, recipe.seed) for env in groups]
    )


def build_reward_shaper(recipe: Recipe, env: EnvSpec) -> RewardShaper:
    """Return the recipe's training reward."""
    from rlinf_vla.rollout.reward_shaping import RewardShaper, env_reward

    config = recipe.reward
    reward = env_reward
    if config.name is not None:
        plugin = plugins.choose("reward", config.name, plugins.rewards())
        reward = plugin.create(config.options, env, torch.device(recipe.cluster.torch_device))
    return RewardShaper(reward, config.weight, config.env_weight, config.terminal)
