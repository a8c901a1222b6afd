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
from rlinf_vla.core.types import ActionSample, Episodes, Inputs
from rlinf_vla.rollout.actor import Actor, noise_task
from rlinf_vla.rollout.demonstrations import LABEL
from rlinf_vla.rollout.noise import MIXTURE, CounterNoise
from rlinf_vla.rollout.player import Call, EpisodeRows, Spans, play_episodes
from rlinf_vla.rollout.stepwise import Stepwise
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


class MixedActor(Stepwise):
    """Execute the policy's chunks, or the expert's actions, one action per call.

    Who acts is drawn where a chunk begins, until the next one: the expert with probability
    ``beta``. ``latent[LABEL]`` ``[B, D]`` is the expert's action in each state.
    """

    def __init__(self, actor: Actor, beta: float, env: VectorEnv) -> None:
        super().__init__(actor, env)
        self._beta = beta
        self._env = env

    def act(self, inputs: Inputs, episodes: Episodes, step: Tensor) -> ActionSample:
        label = self._env.expert_actions().to(CPU, copy=True)
        position = self._position(step)
        keys = (noise_task(episodes), episodes.seed, step - position)
        drawn = CounterNoise(self._actor.settings.run_seed, *keys, MIXTURE).uniform(1)[:, 0]
        by_expert = drawn < self._beta
        begins = (position == 0) & ~by_expert
        own = self._continued(inputs, episodes, step, begins)
        actions = torch.where(by_expert[:, None], label.clamp(-1, 1), own)[:, None]
        none = torch.zeros_like(actions)
        return ActionSample(actions, {LABEL: label}, none, torch.zeros(len(step)))
