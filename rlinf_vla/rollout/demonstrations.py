"""Play a simulator's scripted expert under noise: to imitate it or to label frames."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.errors import Failure
from rlinf_vla.core.devices import CPU
from rlinf_vla.core.protocols import Policy, RewardModel, VectorEnv, prepared
from rlinf_vla.core.types import ActionSample, Episodes, Inputs
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.dataset_source import require_same_control_rate
from rlinf_vla.data.from_dataset import dataset_demonstrations, dataset_frames
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.noise import DETOUR, EXPLORATION, LEVEL, CounterNoise
from rlinf_vla.rollout.player import Call, EpisodeRows, play_episodes
from rlinf_vla.rollout.scripted_actors import ExpertActor, Prepare

LABEL = "label"
_DETOUR_SPEED = 0.5
"""Largest component of a detour's action."""


def collect_demonstrations(
    policy: Policy,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    progress: Callable[[float], None] = lambda fraction: None,
    augmented: bool = False,
) -> tuple[Demonstrations, float | None]:
    """Label states with the expert's noise-free actions, visited under noise; or read datasets.

    Also returns the share of successful episodes, None if a dataset does not record success.
    ``groups`` may be empty if ``config`` names datasets. ``augmented``: prepare the states for
    ``Policy.augment``.
    """
    if config.datasets:
        for entry in config.datasets.values():
            require_same_control_rate(entry.dataset, (env.spec for env in groups))
        return dataset_demonstrations(policy, config, progress, augmented)
    inputs, outcomes = EpisodeRows(config.episodes), EpisodeRows(config.episodes)

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        sound = ~call.result.failed
        inputs.add(index, call.inputs, sound)
        outcomes.add(
            index,
            {LABEL: call.sample.latent[LABEL], form.SUCCESS: call.result.success.any(1)},
            sound,
        )

    prepare = partial(prepared, policy, augmented=augmented)
    play_expert(prepare, groups, config, run_seed, on_call, progress)
    ended = outcomes.all()
    episodes = [(seen, outcome[LABEL]) for seen, outcome in zip(inputs.all(), ended, strict=True)]
    return Demonstrations.of(episodes, policy.horizon), sum(
        bool(outcome[form.SUCCESS][-1]) for outcome in ended
    ) / len(ended)


@torch.no_grad()
def labelled_frames(
    model: RewardModel,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Frames:
    """Return the observation after every step of the demonstrations, labelled by success.

    Raises UserError if a dataset is unreadable, does not fit the model or lacks success.
    """
    if config.datasets:
        return dataset_frames(model, config, progress)
    inputs, outcomes = EpisodeRows(config.episodes), EpisodeRows(config.episodes)

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        sound = ~call.result.failed
        inputs.add(index, prepared(model, call.result.observation), sound)
        outcomes.add(index, {form.SUCCESS: call.result.success.any(1)}, sound)

    play_expert(lambda obs: {}, groups, config, run_seed, on_call, progress)
    seen = inputs.all()
    success = [outcome[form.SUCCESS] for outcome in outcomes.all()]
    numbers = torch.cat([torch.full((len(flags),), number) for number, flags in enumerate(success)])
    return Frames(
        {name: torch.cat([episode_inputs[name] for episode_inputs in seen]) for name in seen[0]},
        torch.cat(success),
        numbers,
    )


def play_expert(
    prepare: Prepare,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    on_call: Callable[[VectorEnv, Call, Tensor], None],
    progress: Callable[[float], None] = lambda fraction: None,
    numbers: range | None = None,
) -> None:
    """Run the demonstration episodes of these numbers, by default ``config.episodes``, one control
    step per call; see :func:`play_episodes`.

    ``latent[LABEL]`` ``[B, D]`` is the expert's action, ``actions`` the executed one. Of an episode
    in which the simulator fails, the steps before count. Raises Failure if no episode has any.
    """
    numbers = range(config.episodes) if numbers is None else numbers
    listed = numbered_episodes(
        DEMONSTRATION_SEEDS, numbers.start, len(numbers), len(groups[0].spec.tasks)
    )
    cut = steps = 0

    def counting(env: VectorEnv, call: Call, index: Tensor) -> None:
        nonlocal cut, steps
        failed = call.result.failed.to(CPU) & (index >= 0)
        cut += int(failed.sum())
        steps += int((index >= 0).sum() - failed.sum())
        on_call(env, call, index)

    play_episodes(
        lambda env: _NoisyExpert(env, prepare, config, run_seed),
        groups,
        listed,
        counting,
        Untimed(),
        progress,
    )
    if not steps:
        raise Failure("the simulator failed in every episode of the expert before its first step")
    if cut:
        print(
            f"{cut} of {len(listed)} episodes of the expert were cut, because the simulator failed",
            file=sys.stderr,
        )


class _NoisyExpert(ExpertActor):
    """Execute the expert's actions with noise; the noise-free action is in the latent."""

    def __init__(
        self, env: VectorEnv, prepare: Prepare, config: DemonstrationConfig, run_seed: int
    ) -> None:
        super().__init__(env, prepare)
        self._config = config
        self._run_seed = run_seed

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        label = self._env.expert_actions().to(CPU, copy=True)
        actions = _explore(label, self._config, self._run_seed, episodes, step)[:, None]
        return ActionSample(
            actions, {LABEL: label}, torch.zeros_like(actions), torch.zeros(len(label))
        )


class Untimed:
    """``Spans`` that nobody reads."""

    def span(self, name: str, track: str) -> nullcontext[None]:
        return nullcontext()


def _explore(
    label: Tensor, config: DemonstrationConfig, run_seed: int, episodes: Episodes, step: Tensor
) -> Tensor:
    """Return actions ``[B, D]``: expert plus the episode's noise, random, or of its detour."""
    episode = (episodes.task_id, episodes.seed)
    levels = torch.tensor(config.noise)
    drawn = (
        CounterNoise(run_seed, *episode, torch.zeros_like(step), LEVEL).uniform(1)[:, 0]
        * len(levels)
    ).long()
    sigma = levels[drawn][:, None]
    noise = CounterNoise(run_seed, *episode, step, EXPLORATION)
    action_dim = label.shape[1]
    random = (noise.uniform(1) < config.random_actions) & (sigma > 0)
    explored = torch.where(
        random, noise.uniform(action_dim) * 2 - 1, label + sigma * noise.normal(action_dim)
    )
    draws = CounterNoise(run_seed, *episode, torch.zeros_like(step), DETOUR).uniform(1 + action_dim)
    on_detour = step < (draws[:, 0] * (config.detour + 1)).long()
    explored = torch.where(on_detour[:, None], _DETOUR_SPEED * (draws[:, 1:] * 2 - 1), explored)
    return explored.clamp(-1, 1)
