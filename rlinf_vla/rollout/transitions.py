"""Convert whole episodes to replay records: observations, actions, rewards and discounts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import EPISODE_COST
from rlinf_vla.algorithms.feature_policy import ACTOR_OUTPUT, FEATURES
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Policy, VectorEnv, precompute_frozen, prepared
from rlinf_vla.core.transitions import ACTED, ACTION, COST, DISCOUNT, REWARD, EpisodeRecords
from rlinf_vla.core.types import FAULTS, Episodes, StepResult
from rlinf_vla.rollout.actor import Actor, rows_of, whole_blocks
from rlinf_vla.rollout.collector import extremes
from rlinf_vla.rollout.faults import Fault
from rlinf_vla.rollout.player import Call, EpisodeRows, Spans, play_episodes
from rlinf_vla.rollout.scripted_actors import ExpertActor

ChunkRewards = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps rewards and validity ``[B, C]`` of chunks to their reward and discount ``[B]``."""


def record_transitions(
    policy: Policy,
    actor: Actor,
    groups: Sequence[VectorEnv],
    episodes: Episodes,
    rewards: ChunkRewards,
    expert: bool,
    spans: Spans,
    progress: Callable[[float], None] = lambda fraction: None,
    watch: Callable[[Call], None] = lambda call: None,
) -> list[EpisodeRecords]:
    """Run ``episodes`` to their end, by ``actor`` or by the scripted expert.

    Returns their records, in their order. ``rewards``: function of (reward, valid), see
    ``algorithms/advantages.py``. ``watch`` gets each call. Raises UserError if the expert cannot
    act for the policy.
    """
    if expert and policy.spec.chunk != 1:
        raise UserError(
            f"expert demonstrations are single actions, not chunks of {policy.spec.chunk}: use a policy with chunk 1"
        )
    episode_rows = EpisodeRows(len(episodes))
    records = [EpisodeRecords({}, False, 0) for _ in range(len(episodes))]

    @torch.no_grad()
    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        watch(call)
        result = call.result
        terminated = (result.terminated & result.valid).any(dim=1)
        done = result.done
        reward, discount = rewards(result.reward, result.valid)
        cost = torch.zeros_like(result.reward) if result.cost is None else result.cost
        latent = call.sample.latent
        seen = (
            {FEATURES: latent[FEATURES]}
            if FEATURES in latent
            else precompute_frozen(policy, call.inputs, actor.settings.batch_size)
        )
        outcome = {
            ACTION: latent[ACTOR_OUTPUT],
            REWARD: reward,
            DISCOUNT: torch.where(terminated, 0, discount),
            ACTED: torch.ones_like(terminated),
            COST: rewards(cost, result.valid)[0],
        }
        episode_rows.add(index, seen | outcome)
        cut = done & ~terminated
        if bool(cut.any()):
            rows = whole_blocks(cut, actor.settings.batch_size)
            last = precompute_frozen(
                policy,
                prepared(policy, rows_of(result.observation, rows)),
                actor.settings.batch_size,
            )
            episode_rows.add(
                index[rows],
                last | {name: torch.zeros_like(value[rows]) for name, value in outcome.items()},
                cut[rows],
            )
        add_outcome(records, result, index)

    actor_of = (
        partial(ExpertActor, prepare=partial(prepared, policy)) if expert else lambda env: actor
    )
    play_episodes(actor_of, groups, episodes, on_call, spans, progress)
    for recorded, rows in zip(records, episode_rows.all(), strict=True):
        recorded.records = rows
    return records


def add_outcome(records: Sequence[EpisodeRecords], result: StepResult, index: Tensor) -> None:
    """Add the outcome of a policy call to the records of its episodes; ``index``: see
    ``play_episodes``."""
    for slot, number in enumerate(index.tolist()):
        if number >= 0:
            record = records[number]
            record.success |= bool((result.success & result.valid)[slot].any())
            record.steps += int(result.valid[slot].sum())
            if result.fault is not None:
                record.fault = max(record.fault, int(result.fault[slot].max()))
            if result.cost is not None:
                record.cost = (record.cost or 0.0) + float(result.cost[slot].sum())


def faults_of_records(
    episodes: Episodes, found: list[EpisodeRecords], tasks: tuple[str, ...]
) -> list[Fault]:
    """Return the ``episodes`` that were cut, of which ``found`` are the records."""
    return [
        Fault(tasks[task], seed, record.steps, FAULTS[record.fault])
        for task, seed, record in zip(
            episodes.task_id.tolist(), episodes.seed.tolist(), found, strict=True
        )
        if record.fault
    ]


def transition_metrics(episodes: Sequence[EpisodeRecords]) -> dict[str, float]:
    count = len(episodes)
    costs = [episode.cost for episode in episodes if episode.cost is not None]
    returns = [float(episode.records[REWARD].sum()) for episode in episodes]
    metrics = {EPISODE_COST: sum(costs) / len(costs)} if costs else {}
    return (
        metrics
        | extremes(returns)
        | {
            "rollout/episodes": float(count),
            "rollout/success_once": sum(episode.success for episode in episodes) / count,
            "rollout/episode_len": sum(episode.steps for episode in episodes) / count,
            "rollout/reward_mean": sum(returns) / sum(episode.steps for episode in episodes),
        }
    )
