"""Collect demonstrations from a simulator's scripted expert under noise, or read a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from rlinf_vla.algorithms.sft import DemonstrationConfig, Demonstrations
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.core.types import ActionSample, Episodes, Inputs
from rlinf_vla.data.from_dataset import dataset_demonstrations, require_same_control_rate
from rlinf_vla.rollout.episode_list import play_episodes
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.rollout.player import Call, InputPreparer
from rlinf_vla.rollout.scripted_actors import ExpertActor

LABEL = "label"
_EXPLORATION, _LEVEL, _IMITATION, _DETOUR = 1, 2, 3, 4  # noise streams; the policy uses 0
_DETOUR_SPEED = 0.5
"""Largest component of a detour's action."""


def collect_demonstrations(
    policy: Policy,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> tuple[Demonstrations, float | None]:
    """Label states with the expert's noise-free actions, visited under noise; or read a dataset.

    Also returns the share of successful episodes, None if a dataset does not record success.
    ``groups`` may be empty if ``config.dataset`` is set.
    """
    if config.dataset is not None:
        require_same_control_rate(config.dataset, (env.spec for env in groups))
        return dataset_demonstrations(policy, config, progress)
    inputs: list[list[Inputs]] = [[] for _ in range(config.episodes)]
    labels: list[list[Tensor]] = [[] for _ in inputs]
    ended: list[bool] = []

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        for slot, number in enumerate(index.tolist()):
            if number < 0:
                continue
            inputs[number].append({name: value[slot] for name, value in call.inputs.items()})
            labels[number].append(call.sample.latent[LABEL][slot])
            if call.result.done[slot]:
                ended.append(bool(call.result.success[slot].any()))
                progress(len(ended) / config.episodes)

    play_expert(policy, groups, config, run_seed, on_call)
    episodes = [
        ({name: torch.stack([each[name] for each in seen]) for name in seen[0]}, torch.stack(said))
        for seen, said in zip(inputs, labels, strict=True)
    ]
    return Demonstrations.of(episodes, policy.spec.chunk), sum(ended) / len(ended)


def play_expert(
    policy: InputPreparer,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    on_call: Callable[[VectorEnv, Call, Tensor], None],
) -> None:
    """Run the demonstration episodes, one control step per call; see :func:`play_episodes`.

    ``latent[LABEL]`` ``[B, D]`` is the expert's action, ``actions`` the executed one.
    """
    listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, config.episodes, len(groups[0].spec.tasks))
    play_episodes(lambda env: _NoisyExpert(policy, env, config, run_seed), groups, listed, on_call, _Untimed())


def imitation_noise(run_seed: int, draws: Tensor) -> CounterNoise:
    """Return the noise of an imitation loss; ``draws`` int64 ``[B]``, >= 0, are its keys."""
    return CounterNoise(run_seed, torch.zeros_like(draws), draws, draws >> 32, _IMITATION)


class _NoisyExpert(ExpertActor):
    """Execute the expert's actions with noise; the noise-free action is in the latent."""

    def __init__(self, policy: InputPreparer, env: VectorEnv, config: DemonstrationConfig, run_seed: int) -> None:
        super().__init__(policy, env)
        self._config, self._run_seed = config, run_seed

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        label = self._env.expert_actions().clone()
        actions = _explore(label, self._config, self._run_seed, episodes, step)[:, None]
        return ActionSample(actions, {LABEL: label}, torch.zeros_like(actions), torch.zeros(len(label), device=label.device))


class _Untimed:
    def span(self, name: str, track: str) -> nullcontext[None]:
        return nullcontext()


def _explore(label: Tensor, config: DemonstrationConfig, run_seed: int, episodes: Episodes, step: Tensor) -> Tensor:
    """Return actions ``[B, D]``: expert plus the episode's noise, random, or of its detour."""
    episode = (episodes.task_id, episodes.seed)
    levels = torch.tensor(config.noise)
    drawn = (CounterNoise(run_seed, *episode, torch.zeros_like(step), _LEVEL).uniform(1)[:, 0] * len(levels)).long()
    sigma = levels[drawn][:, None]
    noise = CounterNoise(run_seed, *episode, step, _EXPLORATION)
    action_dim = label.shape[1]
    random = (noise.uniform(1) < config.random_actions) & (sigma > 0)
    explored = torch.where(random, noise.uniform(action_dim) * 2 - 1, label.cpu() + sigma * noise.normal(action_dim))
    draws = CounterNoise(run_seed, *episode, torch.zeros_like(step), _DETOUR).uniform(1 + action_dim)
    on_detour = step < (draws[:, 0] * (config.detour + 1)).long()
    explored = torch.where(on_detour[:, None], _DETOUR_SPEED * (draws[:, 1:] * 2 - 1), explored)
    return explored.clamp(-1, 1).to(label.device)
