"""Evaluate on a fixed list of episodes; equal seeds pair the results of all checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import EnvSpec, VectorEnv
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.core.types import FAULTS, Episodes
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.rollout.player import ActorProtocol, Call, Spans, play_episodes


@dataclass
class EpisodeResult:
    """Outcome of one evaluation episode."""

    task: str
    seed: int
    instruction: str = ""
    success: bool = False
    steps: int = 0
    """Control steps of the episode."""
    episode_return: float = 0.0
    """Undiscounted sum of rewards."""
    frames: list[Tensor] = field(default_factory=list)
    """uint8 ``[H, W, 3]`` after every policy call; empty unless the episode was filmed."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON values: ``cost``, the number of changes by safety limits, where there are limits;
    ``fault``, what cut the episode, if anything did; at a robot also why it ended, who acted, what
    the limits changed."""

    def row(self) -> dict[str, Any]:
        """Return the outcome as JSON values, as every result file lists it."""
        fields = ("task", "seed", "instruction", "success", "steps")
        return (
            {name: getattr(self, name) for name in fields}
            | {"return": self.episode_return}
            | self.details
        )


def play_evaluation(
    actor: Actor,
    groups: Sequence[VectorEnv],
    numbers: range,
    spans: Spans,
    filmed: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
    probe: str | None = None,
) -> list[EpisodeResult]:
    """Play evaluation episodes ``numbers``, film those below ``filmed``; results are in order.
    Raises UserError, see ``require_starts``."""
    spec = groups[0].spec
    require_starts(spec, -(-numbers.stop // len(spec.tasks)))
    listed = numbered_episodes(EVALUATION_SEEDS, numbers.start, len(numbers), len(spec.tasks))
    return play_episode_list(
        lambda _: actor,
        groups,
        listed,
        spans,
        lambda index: numbers[index] < filmed,
        progress,
        probe,
    )


def require_starts(spec: EnvSpec, episodes: int) -> None:
    """Raises UserError if ``episodes`` of a task would repeat an initial state. Intervals and tests
    take episodes as independent; a greedy policy would do the same again."""
    if spec.starts is not None and episodes > spec.starts:
        raise UserError(
            f"episodes: {episodes} of each task, which has only {spec.starts} initial states here: play at most as many"
        )


def play_episode_list(
    actor_of: Callable[[VectorEnv], ActorProtocol],
    groups: Sequence[VectorEnv],
    listed: Episodes,
    spans: Spans,
    filmed: Callable[[int], bool] = lambda index: False,
    progress: Callable[[float], None] = lambda fraction: None,
    probe: str | None = None,
) -> list[EpisodeResult]:
    """Play these episodes and return results in order; film index ``i`` where ``filmed(i)``.

    ``probe``: one of PROBES, which changes what the policy observes; None: nothing is changed.
    Results name the instruction that the policy was given.
    """
    if probe is not None:
        from rlinf_vla.rollout.probes import ProbedEnv

        groups = [ProbedEnv(env, probe) for env in groups]
    names = groups[0].spec.tasks
    results = [
        EpisodeResult(names[task], seed)
        for task, seed in zip(listed.task_id.tolist(), listed.seed.tolist(), strict=True)
    ]

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        result = call.result
        steps = result.valid.sum(1).tolist()
        rewards = result.reward.sum(1).tolist()
        success = result.success.any(1).tolist()
        costs = None if result.cost is None else result.cost.sum(1).tolist()
        for slot, number in enumerate(index.tolist()):
            if number < 0:
                continue
            running = results[number]
            if costs is not None:
                running.details["cost"] = running.details.get("cost", 0.0) + costs[slot]
            running.steps += steps[slot]
            running.episode_return += rewards[slot]
            running.success |= success[slot]
            if result.fault is not None and (fault := int(result.fault[slot].max())):
                running.details["fault"] = FAULTS[fault]
            running.instruction = result.observation.instruction[slot]
            if filmed(number):
                running.frames.append(env.render(slot))

    play_episodes(actor_of, groups, listed, on_call, spans, progress)
    return results
