"""Demonstrations from a simulator's scripted expert, in states that a beginner gets into."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from rlinf_vla.algorithms.sft import DemonstrationConfig, Demonstrations
from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.rollout.player import interleave
from rlinf_vla.types import Episodes, Inputs

_EXPLORATION, _LEVEL, _IMITATION, _DETOUR = 1, 2, 3, 4  # noise streams; 0 is the policy's
_DETOUR_SPEED = 0.5
"""Largest component of a detour's action."""


def demonstrate(
    policy: Policy,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> tuple[Demonstrations, float]:
    """Play the expert under noise and label every state with its clean action. Also returns the expert's success rate under that noise."""
    episodes: list[_Recording] = []

    def finished(recording: _Recording) -> None:
        episodes.append(recording)
        progress(len(episodes) / config.episodes)

    queue = _Queue(config.episodes, len(groups[0].spec.tasks))
    interleave([_record(policy, env, config, run_seed, queue, finished) for env in groups])
    episodes.sort(key=lambda recording: recording.seed)
    parts = [recording.demonstrations(policy.spec.chunk) for recording in episodes]
    names = parts[0].inputs.keys()
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in names}
    actions = torch.cat([part.actions for part in parts])
    return Demonstrations(inputs, actions, torch.arange(len(actions))), sum(e.success for e in episodes) / len(episodes)


def imitation_noise(run_seed: int, draws: Tensor) -> CounterNoise:
    """The random numbers of a loss on demonstrations; ``draws`` int64 ``[B]``."""
    zero = torch.zeros_like(draws)
    return CounterNoise(run_seed, zero, draws, zero, _IMITATION)


class _Queue:
    """Hands out demonstration episodes; past the last one it repeats it, for environments that have nothing left to do."""

    def __init__(self, count: int, num_tasks: int) -> None:
        self._all, self._next = numbered_episodes(DEMONSTRATION_SEEDS, 0, count, num_tasks), 0

    def take(self) -> tuple[Episodes, bool]:
        index, self._next = min(self._next, len(self._all) - 1), self._next + 1
        return self._all[index : index + 1], self._next <= len(self._all)


class _Recording:
    def __init__(self, seed: int) -> None:
        self.seed, self.success = seed, False
        self.inputs: list[Inputs] = []
        self.actions: list[Tensor] = []

    def demonstrations(self, chunk: int) -> Demonstrations:
        """Each state with the next ``chunk`` expert actions; past the end the last one is repeated."""
        actions = torch.stack(self.actions)
        steps = torch.arange(len(actions))[:, None] + torch.arange(chunk)
        inputs = {name: torch.stack([each[name] for each in self.inputs]) for name in self.inputs[0]}
        return Demonstrations(inputs, actions[steps.clamp(max=len(actions) - 1)], torch.arange(len(actions)))


def _record(
    policy: Policy,
    env: VectorEnv,
    config: DemonstrationConfig,
    run_seed: int,
    queue: _Queue,
    finished: Callable[[_Recording], None],
) -> Generator[None, None, None]:
    taken = [queue.take() for _ in range(env.spec.num_envs)]
    recordings = [_Recording(int(episode.seed)) if wanted else None for episode, wanted in taken]
    episodes = Episodes.first_attempts(torch.cat([e.task_id for e, _ in taken]), torch.cat([e.seed for e, _ in taken]))
    step = torch.zeros(len(taken), dtype=torch.int64)
    env.reset_async(episodes)
    yield
    observation = env.reset_wait()
    while any(recordings):
        label = env.expert_actions()
        inputs = policy.prepare(observation)
        for slot, recording in enumerate(recordings):
            if recording:
                recording.inputs.append({name: value[slot] for name, value in inputs.items()})
                recording.actions.append(label[slot].clone())
        env.step_async(_explore(label, config, run_seed, episodes, step)[:, None])
        yield
        result = env.step_wait()
        step, observation, done = step + 1, result.observation, result.done.cpu()
        if not done.any():
            continue
        for slot in done.nonzero().flatten().tolist():
            recording = recordings[slot]
            if recording:
                recording.success = bool(result.success[slot].any())
                finished(recording)
            episode, wanted = queue.take()
            recordings[slot] = _Recording(int(episode.seed)) if wanted else None
            episodes.task_id[slot], episodes.seed[slot], step[slot] = episode.task_id[0], episode.seed[0], 0
        env.reset_async(episodes, done)
        yield
        observation = env.reset_wait()


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
