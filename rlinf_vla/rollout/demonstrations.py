"""Demonstrations: from a simulator's scripted expert, in states that a beginner gets into, or out of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from rlinf_vla.algorithms.sft import DemonstrationConfig, Demonstrations
from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.from_dataset import dataset_demonstrations, refuse_another_pace
from rlinf_vla.rollout.listed import play_listed
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.rollout.player import Call, Prepares
from rlinf_vla.rollout.scripted import Expert
from rlinf_vla.types import ActionSample, Episodes, Inputs

LABEL = "label"
_EXPLORATION, _LEVEL, _IMITATION, _DETOUR = 1, 2, 3, 4  # noise streams; 0 is the policy's
_DETOUR_SPEED = 0.5
"""Largest component of a detour's action."""


def demonstrate(
    policy: Policy,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> tuple[Demonstrations, float | None]:
    """Play the expert under noise and label every state with its clean action; or read ``config.dataset``, where ``groups`` are not needed.

    Also returns the share of episodes that succeeded, None where a dataset does not say.
    """
    if config.dataset is not None:
        refuse_another_pace(config.dataset, (env.spec for env in groups))
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
    policy: Prepares,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    on_call: Callable[[VectorEnv, Call, Tensor], None],
) -> None:
    """The demonstration episodes, a control step per call: ``latent[LABEL]`` ``[B, D]`` is what the expert said, ``actions`` what was done.

    ``on_call``: see :func:`play_listed`.
    """
    listed = numbered_episodes(DEMONSTRATION_SEEDS, 0, config.episodes, len(groups[0].spec.tasks))
    play_listed(lambda env: _NoisyExpert(policy, env, config, run_seed), groups, listed, on_call, _Untimed())


def imitation_noise(run_seed: int, draws: Tensor) -> CounterNoise:
    """The random numbers of a loss on demonstrations; ``draws`` int64 ``[B]``, not negative: each has numbers of its own."""
    return CounterNoise(run_seed, torch.zeros_like(draws), draws, draws >> 32, _IMITATION)


class _NoisyExpert(Expert):
    """The same under noise; what it would have done without stands in the latent."""

    def __init__(self, policy: Prepares, env: VectorEnv, config: DemonstrationConfig, run_seed: int) -> None:
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
    """``[B, D]`` expert actions with the noise of their episodes, or an action of their detour."""
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
