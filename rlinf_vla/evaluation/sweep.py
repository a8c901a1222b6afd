"""Success on a fixed list of episodes: the same seeds for every checkpoint, so that any two are paired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlinf_vla.protocols import VectorEnv
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import EVALUATION_SEEDS, numbered_episodes
from rlinf_vla.rollout.listed import play_listed
from rlinf_vla.rollout.player import Acts, Call, Spans
from rlinf_vla.types import Episodes


@dataclass
class EpisodeResult:
    task: str
    seed: int
    instruction: str = ""
    success: bool = False
    steps: int = 0
    """Control steps until the end."""
    episode_return: float = 0.0
    """Undiscounted sum of rewards."""
    frames: list[Tensor] = field(default_factory=list)
    """uint8 ``[H, W, 3]`` after every policy call, for the episodes that were filmed."""


def sweep(
    actor: Actor,
    groups: Sequence[VectorEnv],
    numbers: range,
    spans: Spans,
    filmed: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[EpisodeResult]:
    """Play the evaluation episodes of these ``numbers`` and film those below ``filmed``; results in the order of the numbers."""
    listed = numbered_episodes(EVALUATION_SEEDS, numbers.start, len(numbers), len(groups[0].spec.tasks))
    return play_out(lambda _: actor, groups, listed, spans, lambda place: numbers[place] < filmed, progress)


def play_out(
    actor_of: Callable[[VectorEnv], Acts],
    groups: Sequence[VectorEnv],
    listed: Episodes,
    spans: Spans,
    filmed: Callable[[int], bool] = lambda place: False,
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[EpisodeResult]:
    """Play these episodes, results in their order; ``filmed`` says of which places in the list there are to be frames."""
    names = groups[0].spec.tasks
    results = [EpisodeResult(names[task], seed) for task, seed in zip(listed.task_id.tolist(), listed.seed.tolist(), strict=True)]
    ended = 0

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        nonlocal ended
        result, done = call.result, call.result.done.tolist()
        steps, rewards, success = result.valid.sum(1).tolist(), result.reward.sum(1).tolist(), result.success.any(1).tolist()
        for slot, number in enumerate(index.tolist()):
            if number < 0:
                continue
            running = results[number]
            running.steps += steps[slot]
            running.episode_return += rewards[slot]
            running.success |= success[slot]
            running.instruction = result.observation.instruction[slot]
            if filmed(number):
                running.frames.append(env.render(slot))
            ended += done[slot]
        progress(ended / len(results))

    play_listed(actor_of, groups, listed, on_call, spans)
    return results
