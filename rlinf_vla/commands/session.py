"""What every verb builds from a recipe: policy, environments, trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlinf_vla import plugins
from rlinf_vla.algorithms.grpo import GRPO
from rlinf_vla.algorithms.ppo import PPO
from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.algorithms.soft import SoftPolicy
from rlinf_vla.protocols import EnvSpec, Policy, RewardModel, VectorEnv
from rlinf_vla.recipe import Recipe, RewardConfig, asset_path
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.rollout.rewarded import RewardedEnv, Worth, own_reward
from rlinf_vla.rollout.split import keep_head, require_separable
from rlinf_vla.training.checkpoint import load_heads
from rlinf_vla.training.gradient_checkpointing import checkpoint_blocks
from rlinf_vla.training.lora import add_lora
from rlinf_vla.training.soft_trainer import SoftTrainer
from rlinf_vla.training.trainer import Optimisation, Trainer
from rlinf_vla.types import Observation, UserError

ALGORITHMS: dict[str, Any] = {"ppo": PPO, "grpo": GRPO, "sac": SAC}


def build_algorithm(recipe: Recipe) -> Any:
    """Raises UserError where its settings are wrong."""
    return ALGORITHMS[recipe.algorithm.name](recipe.algorithm, recipe.rollout.temperature)


def build_policy(recipe: Recipe, lora: bool = True) -> Policy:
    """The recipe's policy on its device, with fresh adapters, and with the critic where an exported checkpoint brings one.

    Random weights depend on the recipe's seed alone.
    """
    if recipe.cluster.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"cluster.device=cuda (cluster={recipe.cluster.name}): PyTorch sees no CUDA device here; use cluster=laptop with "
            "cluster.device=cpu, or cluster=1gpu where there is a GPU and a PyTorch for CUDA"
        )
    model = plugins.choose("model", recipe.model.name, plugins.models())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        directory = asset_path(recipe.model.checkpoint)
        policy: Policy = model.load(directory, recipe.model.options)
    if lora:
        add_lora(policy, recipe.model.lora, recipe.seed)
    if isinstance(recipe.algorithm, SACConfig):
        policy = soft(policy, recipe.algorithm, recipe.seed)
    load_heads(policy, directory)
    if recipe.cluster.gradient_checkpointing:
        checkpoint_blocks(policy)
    return policy.to(recipe.cluster.device)


def build_head(recipe: Recipe) -> Policy:
    """The part of the recipe's policy that acts; its weights are still to be filled in."""
    model = plugins.choose("model", recipe.model.name, plugins.models())
    require_separable(model)
    policy: Policy = model.without_weights(asset_path(recipe.model.checkpoint), recipe.model.options)
    with torch.device("meta"):
        add_lora(policy, recipe.model.lora, recipe.seed)
    keep_head(policy)
    return policy


def build_reward_model(recipe: Recipe) -> RewardModel:
    """The network behind the recipe's reward; random weights depend on the recipe's seed alone."""
    if recipe.reward.name is None:
        raise UserError("algorithm=classifier trains the network of a reward: set reward=classifier")
    plugin = plugins.choose("reward", recipe.reward.name, plugins.rewards())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return plugin.learner(recipe.reward.options).to(recipe.cluster.device)


def soft(policy: Policy, config: SACConfig, seed: int) -> SoftPolicy:
    """What SAC trains: the policy's features, and fresh heads that depend on the seed alone."""
    nothing = Observation(
        {name: torch.zeros(1, *size, 3, dtype=torch.uint8) for name, size in policy.spec.images.items()},
        torch.zeros(1, policy.spec.state_dim),
        ["nothing"],
    )
    if config.frozen_backbone:
        policy.backbone.requires_grad_(False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        features = policy.pooled(policy.encode(policy.prepare(nothing))).shape[1]
        torch.manual_seed(seed)
        return SoftPolicy(policy, features, config)


def build_trainer(recipe: Recipe, policy: Policy) -> Trainer | SoftTrainer:
    config = recipe.algorithm
    if isinstance(policy, SoftPolicy):
        return SoftTrainer(policy, config)
    rate = config.learning_rate
    settings = Optimisation(rate, getattr(config, "value_learning_rate", rate), config.max_grad_norm, betas=(0.9, config.adam_beta2))
    return Trainer(policy, settings, recipe.cluster.micro_batch_size, keep_reference=config.kl_coef > 0)


@contextmanager
def open_envs(recipe: Recipe, policy: Policy | None, groups: int) -> Iterator[Sequence[VectorEnv]]:
    """The recipe's environments in ``groups`` groups, checked against the policy that is to act in them; closed at the end."""
    envs = plugins.choose("env", recipe.env.name, plugins.envs()).create(recipe.env, groups)
    try:
        if policy is not None:
            check_fit(policy, envs[0])
        yield envs
    finally:
        for env in envs:
            env.close()


def rewarded(recipe: Recipe, groups: Sequence[VectorEnv]) -> Sequence[VectorEnv]:
    """The same environments, worth what the recipe's reward says."""
    if recipe.reward == RewardConfig():
        return groups
    worth = build_worth(recipe, groups[0].spec)
    return [RewardedEnv(env, worth) for env in groups]


def build_worth(recipe: Recipe, env: EnvSpec) -> Worth:
    config, reward = recipe.reward, own_reward
    if config.name is not None:
        plugin = plugins.choose("reward", config.name, plugins.rewards())
        reward = plugin.create(config.options, env, torch.device(recipe.cluster.device))
    return Worth(reward, config.weight, config.env_weight, config.terminal)


def check_fit(policy: Policy, env: VectorEnv) -> None:
    """Raises UserError where the policy cannot drive these environments."""
    if policy.spec.action_dim != env.spec.action_dim:
        raise UserError(
            f"the policy's actions have {policy.spec.action_dim} dimensions, the environment's {env.spec.action_dim}: "
            "choose another env.control_mode or model.checkpoint"
        )
    for name, size in policy.spec.images.items():
        if name not in env.spec.images:
            shown = sorted(env.spec.images) or "none"
            raise UserError(f"the policy looks at image {name!r}, the environment shows {shown}: set env.cameras or model.options.image")
        height, width = env.spec.images[name]
        if height < size[0] or width < size[1]:
            raise UserError(
                f"the policy's image {name!r} is {size[0]}x{size[1]} pixels, the environment renders {height}x{width}: "
                f"set env.image_size={size[0]}"
            )


def actor_settings(recipe: Recipe, temperature: float) -> Settings:
    return Settings(recipe.seed, temperature, recipe.rollout.batch_size, recipe.cluster.cuda_graphs, recipe.rollout.rounded_weights)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """CPU threads of PyTorch for a while; None: all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def new_directory(output: str) -> Path:
    """Where a verb writes. Raises UserError where there is something."""
    path = Path(output).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"output={path} is not empty: choose another directory, or empty this one")
    return path


def relative(path: Path) -> Path:
    """As a person would type it from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
