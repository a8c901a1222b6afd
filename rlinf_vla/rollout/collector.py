"""Collect rollouts of a fixed number of policy calls, or of given episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import EPISODE_COST
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.protocols import EnvSpec, Policy, VectorEnv
from rlinf_vla.core.types import Episodes, Tensors, Trajectory
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import training_episodes
from rlinf_vla.rollout.player import Call, Spans, interleave, play_episodes, rollout_generator

Beside = Callable[[Call], Tensors]


AT_BOUND = 0.99
"""Magnitude from which a number of an action counts as at its bound, which is 1 (conventions.md):
the outermost centre of OpenVLA's 255 bins is 0.996."""
CLOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "open_positive": lambda gripper: gripper < 0,
    "close_positive": lambda gripper: gripper > 0,
    "zero_to_one": lambda gripper: gripper < 0.5,
}
"""``Convention.gripper`` -> whether a command closes it."""
SHARES = {
    "rollout/actions_at_bounds": ("at_bounds", "numbers"),
    "rollout/gripper_closed": ("closed", "commands"),
    "rollout/state_outliers": ("outliers", "entries"),
}
"""Metric -> the counts of ``CallCounts`` that it is the quotient of."""


class CallCounts:
    """Counts of what a policy saw and commanded in its calls, for ``call_metrics``.

    numbers, at_bounds: of executed actions, without the gripper, where bounds are known. commands,
    closed: of the gripper, where its convention is known. entries, outliers: of normalised states.
    """

    def __init__(self, env: EnvSpec, policy: Policy) -> None:
        convention = env.convention
        self._bounded = convention.tool is not None
        self._closed = CLOSED.get(convention.gripper or "")
        self._moving = env.action_dim - (self._closed is not None)
        self._state = policy.state_limit
        self._state_dim = policy.spec.state_dim
        self._counts = Counter[str]()
        self._outliers: Tensor | int = 0

    def add(self, call: Call) -> None:
        """Count a call. Nothing waits for a GPU, where the inputs may be."""
        executed = call.sample.actions[call.result.valid]
        if self._bounded:
            moving = executed[:, : self._moving]
            self._counts["numbers"] += moving.numel()
            self._counts["at_bounds"] += int((moving.abs() >= AT_BOUND).sum())
        if self._closed is not None:
            self._counts["commands"] += len(executed)
            self._counts["closed"] += int(self._closed(executed[:, -1]).sum())
        if self._state is not None and self._state[0] in call.inputs:
            name, limit = self._state
            state = call.inputs[name][:, : self._state_dim]
            self._counts["entries"] += state.numel()
            self._outliers = self._outliers + (state.abs() >= limit).sum()

    def totals(self) -> dict[str, int]:
        return {**self._counts, "outliers": int(self._outliers)}


def call_metrics(counts: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Return the SHARES of the sums of ``CallCounts.totals``; without those of which none is."""
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return {
        name: total[part] / total[whole] for name, (part, whole) in SHARES.items() if total[whole]
    }


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
    return (
        {
            "rollout/steps": float(calls.valid.sum()),
            "rollout/episodes": float(len(success)),
            "rollout/reward_mean": calls.reward[calls.valid].mean().item(),
            "rollout/success_once": success.float().mean().item(),
            "rollout/episode_len": calls.valid.sum().item() / len(success),
        }
        | return_metrics(calls)
        | cost_metrics(calls)
    )


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
    return metrics | return_metrics(rollouts) | cost_metrics(rollouts)


def return_metrics(calls: Trajectory) -> dict[str, float]:
    """Return the extremes of the undiscounted returns of all episodes, complete or not."""
    ids = calls.episode_ids().flatten()
    reward = torch.where(calls.valid, calls.reward, 0).double().sum(-1).flatten()
    returns = torch.zeros(int(ids.max()) + 1, dtype=torch.float64).index_add(0, ids, reward)
    return extremes(returns.tolist())


def extremes(returns: Sequence[float]) -> dict[str, float]:
    return {"rollout/return_min": min(returns), "rollout/return_max": max(returns)}


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
