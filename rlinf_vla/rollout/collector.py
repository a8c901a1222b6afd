"""Collect rollouts of a fixed number of policy calls, or of given episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import EPISODE_COST
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes, Tensors, Trajectory
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import training_episodes
from rlinf_vla.rollout.player import Call, Spans, interleave, play_episodes, rollout_generator

Beside = Callable[[Call], Tensors]


def rollout_calls(horizon: int, episode_limit: int, steps: int) -> int:
    """Return the policy calls that ``horizon / episode_limit`` full episodes need.

    ``steps``: control steps per call. The limit may cut an episode's last call short.
    """
    return horizon // episode_limit * -(-episode_limit // steps)


def collect(
    actor: Actor,
    groups: Sequence[VectorEnv],
    iteration: int,
    policy_version: int,
    calls: int,
    spans: Spans,
    progress: Callable[[float], None] = lambda fraction: None,
    first: int = 0,
    beside: Beside = lambda call: {},
) -> Trajectory:
    """Return a rollout ``[calls, B]`` of all groups' environments, in their order.

    It depends only on the policy and on (run seed, iteration). ``first``: index of the first
    environment within the whole run. ``beside(call)``: extra tensors stored with a call's inputs.
    """
    parts: list[list[Trajectory]] = [[] for _ in groups]
    players = []
    offset = first
    total = calls * len(groups)
    for index, env in enumerate(groups):
        slots = torch.arange(offset, offset + env.spec.num_envs)
        offset += env.spec.num_envs
        ordinal = torch.zeros_like(slots)

        def following(
            done: Tensor, env: VectorEnv = env, slots: Tensor = slots, ordinal: Tensor = ordinal
        ) -> tuple[Episodes, Tensor]:
            ordinal += done.long()
            return training_episodes(
                actor.settings.run_seed, iteration, slots, ordinal, len(env.spec.tasks)
            ), done

        def on_call(call: Call, part: list[Trajectory] = parts[index]) -> bool:
            part.append(_row(call, policy_version, beside))
            progress(sum(map(len, parts)) / total)
            return False

        begun = following(torch.zeros_like(slots))[0]
        always = actor.settings.values_ends
        players.append(
            rollout_generator(
                actor, env, begun, following, on_call, spans, f"simulator {index}", calls, always
            )
        )
    try:
        interleave(players)
    finally:
        for player in players:
            player.close()
    return Trajectory.cat([Trajectory.stack(part) for part in parts], dim=1)


def collect_episodes(
    actor: Actor,
    groups: Sequence[VectorEnv],
    episodes: Episodes,
    policy_version: int,
    spans: Spans,
    progress: Callable[[float], None] = lambda fraction: None,
    beside: Beside = lambda call: {},
) -> Trajectory:
    """Run each of ``episodes`` once; return ``[N]`` calls ordered by (episode, step).

    The result does not depend on which environment ran which episode.
    """
    parts: list[Trajectory] = []
    order: list[Tensor] = []

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        mask = index >= 0
        row = _row(call, policy_version, beside)
        parts.append(row[mask])
        order.append((index[mask] << 32) + call.step[mask])

    play_episodes(lambda _: actor, groups, episodes, on_call, spans, progress)
    calls = Trajectory.cat(parts, dim=0)
    return calls[torch.cat(order).argsort()]


def episode_metrics(calls: Trajectory) -> dict[str, float]:
    """Compute metrics of complete episodes, ``[N]`` calls."""
    success = calls.episode_success()
    return {
        "rollout/steps": float(calls.valid.sum()),
        "rollout/episodes": float(len(success)),
        "rollout/reward_mean": calls.reward[calls.valid].mean().item(),
        "rollout/success_once": success.float().mean().item(),
        "rollout/episode_len": calls.valid.sum().item() / len(success),
    } | cost_metrics(calls)


def rollout_metrics(rollouts: Trajectory) -> dict[str, float]:
    """Compute metrics of the episodes that ended in a rollout; biased towards short episodes.

    Use an evaluation for an unbiased success rate.
    """
    ended = ((rollouts.terminated | rollouts.truncated) & rollouts.valid).any(-1)
    success = (rollouts.success & rollouts.valid).any(-1)
    for t in range(
        1, len(success)
    ):  # one success counts for the whole episode, where success does not end it
        success[t] |= success[t - 1] & ~ended[t - 1]
    lengths = rollouts.step + rollouts.valid.sum(-1)
    episodes = int(ended.sum())
    metrics = {"rollout/steps": float(rollouts.valid.sum()), "rollout/episodes": float(episodes)}
    metrics["rollout/reward_mean"] = rollouts.reward[rollouts.valid].mean().item()
    if episodes:
        metrics["rollout/success_once"] = success[ended].float().mean().item()
        metrics["rollout/episode_len"] = lengths[ended].float().mean().item()
    return metrics | cost_metrics(rollouts)


def cost_metrics(calls: Trajectory) -> dict[str, float]:
    """Return the mean cost of the episodes that ended; nothing without a cost or if none ended."""
    if calls.cost is None:
        return {}
    ids = calls.episode_ids().flatten()
    ended = ((calls.terminated | calls.truncated) & calls.valid).any(-1).flatten()
    over = torch.zeros(int(ids.max()) + 1, dtype=torch.bool).index_fill(0, ids[ended], True)
    cost = torch.zeros(len(over), dtype=torch.float64).index_add(
        0, ids, calls.cost.double().sum(-1).flatten()
    )
    return {EPISODE_COST: cost[over].mean().item()} if bool(over.any()) else {}


def _row(call: Call, policy_version: int, beside: Beside) -> Trajectory:
    sample, result = call.sample, call.result
    return Trajectory(
        inputs=moved(call.inputs | beside(call), CPU),
        latent=sample.latent,
        log_prob=sample.log_prob,
        value=sample.value,
        bootstrap_value=call.bootstrap_value,
        cut=call.cut,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        success=result.success,
        valid=result.valid,
        task_id=call.episodes.task_id,
        seed=call.episodes.seed,
        attempt=call.episodes.attempt,
        step=call.step,
        policy_version=torch.full_like(call.step, policy_version),
        cost=result.cost,
        fault=result.fault,
    )
