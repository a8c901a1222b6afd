"""Record what a policy visits, labelled by the simulator's scripted expert at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rlinf_vla.algorithms.sft import action_chunks
from rlinf_vla.core.devices import CPU
from rlinf_vla.core.protocols import Policy, VectorEnv
from rlinf_vla.core.transitions import ACTED, ACTION, LATENT, REWARD, EpisodeRecords
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation
from rlinf_vla.rollout.actor import Actor, noise_task, whole_blocks
from rlinf_vla.rollout.demonstrations import LABEL
from rlinf_vla.rollout.noise import MIXTURE, CounterNoise
from rlinf_vla.rollout.player import Call, EpisodeRows, Spans, play_episodes
from rlinf_vla.rollout.transitions import add_outcome


def record_visits(
    policy: Policy,
    actor: Actor,
    groups: Sequence[VectorEnv],
    episodes: Episodes,
    beta: float | None,
    spans: Spans,
    progress: Callable[[float], None] = lambda fraction: None,
    watch: Callable[[Call], None] = lambda call: None,
) -> list[EpisodeRecords]:
    """Run ``episodes`` to their end, by ``actor`` and with probability ``beta`` by the expert.

    Returns a record of each control step, in the order of the episodes: the policy's inputs,
    ``action`` ``[horizon, D]``, the expert's actions in this state and in those visited next, and
    ``reward``. ``acted`` is false where the simulator failed. ``watch`` gets each call. Raises
    UserError if the task has no expert.

    If ``beta`` is None, no expert is asked: a record is a policy call, with its latents.
    """
    rows = EpisodeRows(len(episodes))
    records = [EpisodeRecords({}, False, 0) for _ in range(len(episodes))]

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        watch(call)
        result = call.result
        outcome = {REWARD: result.reward.sum(1), ACTED: ~result.failed}
        latent = {f"{LATENT}{name}": value for name, value in call.sample.latent.items()}
        rows.add(index, call.inputs | latent | outcome)
        add_outcome(records, result, index)

    actor_of = partial(MixedActor, actor, beta) if beta is not None else lambda env: actor
    play_episodes(actor_of, groups, episodes, on_call, spans, progress)
    for record, visited in zip(records, rows.all(), strict=True):
        if beta is None:
            record.records = visited
            continue
        labels = visited.pop(f"{LATENT}{LABEL}")
        sound = int(visited[ACTED].sum())  # the simulator fails in an episode's last step
        chunks = action_chunks(labels[:sound], policy.horizon)
        unused = chunks.new_zeros(len(labels) - sound, *chunks.shape[1:])
        record.records = visited | {ACTION: torch.cat([chunks, unused])}
    return records


class MixedActor:
    """Execute the policy's chunks, or the expert's actions, one action per call.

    Who acts is drawn where a chunk begins, until the next one: the expert with probability
    ``beta``. The states are those that the policy visits with whole chunks. ``latent[LABEL]``
    ``[B, D]`` is the expert's action in each of them.
    """

    def __init__(self, actor: Actor, beta: float, env: VectorEnv) -> None:
        spec = actor.policy.spec
        self._actor = actor
        self._beta = beta
        self._env = env
        self._chunk = torch.zeros(env.spec.num_envs, spec.chunk, spec.action_dim)
        """The policy's present chunk in each environment; arbitrary where the expert acts."""

    def prepare(self, obs: Observation) -> Inputs:
        return self._actor.prepare(obs)

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        label = self._env.expert_actions().to(CPU, copy=True)
        settings = self._actor.settings
        position = step % self._chunk.shape[1]
        keys = (noise_task(episodes), episodes.seed, step - position)
        by_expert = CounterNoise(settings.run_seed, *keys, MIXTURE).uniform(1)[:, 0] < self._beta
        begins = (position == 0) & ~by_expert
        if bool(begins.any()):
            rows = whole_blocks(begins, settings.batch_size)
            blocks = {name: value[rows.to(value.device)] for name, value in inputs.items()}
            fresh = self._actor.act(blocks, episodes[rows], step[rows]).actions
            self._chunk[rows] = torch.where(begins[rows, None, None], fresh, self._chunk[rows])
        own = self._chunk[torch.arange(len(step)), position]
        actions = torch.where(by_expert[:, None], label.clamp(-1, 1), own)[:, None]
        none = torch.zeros_like(actions)
        return ActionSample(actions, {LABEL: label}, none, torch.zeros(len(step)))

    def value(self, obs: Observation, wanted: Tensor) -> Tensor:
        raise NotImplementedError("an episode is played to its end")
