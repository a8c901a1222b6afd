"""A recorded robot episode: observations, actions, operator steps; its file and replay records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, moved
from rlinf_vla.core.io import parse_json, replacing
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.rollout.episodes import numbered_episodes

TRAINING = "training"
EVALUATION = "evaluation"
DEMONSTRATION = "demonstration"
RUN = "run"
IMAGE = "image."
_ABOUT = "about"


@dataclass(frozen=True)
class Job:
    """An episode to be run.

    kind: TRAINING, EVALUATION, DEMONSTRATION, or RUN: as an evaluation, but the operator may help.
    number: index within its kind. scripted: the scene's expert acts, unless the operator does.
    temperature: sampling temperature of the policy; 0 is greedy. weights: minimum version of the
    policy's weights.
    """

    kind: str
    number: int
    seed: int
    scripted: bool = False
    temperature: float = 1.0
    weights: int = 0

    @property
    def file(self) -> str:
        return f"{self.kind}_{self.number:06d}.safetensors"

    @property
    def judged(self) -> bool:
        """Whether its success counts, so that a fault is a failure and is not repeated."""
        return self.kind in (EVALUATION, RUN)


def first_jobs(kind: str, seeds: range, count: int, **settings: Any) -> list[Job]:
    """Return the first ``count`` jobs of a kind. Raises IndexError past the end of ``seeds``."""
    return [
        Job(kind, number, seed, **settings)
        for number, seed in enumerate(numbered_episodes(seeds, 0, count, 1).seed.tolist())
    ]


@dataclass(frozen=True)
class RobotEpisode:
    """``N`` executed steps with their observations, and the final observation.

    images: uint8 ``[N + 1, H, W, 3]`` by camera. state: float32 ``[N + 1, 8]``. tick: int64
    ``[N + 1]``, control periods since the start, with gaps where the arm was held. action: float32
    ``[N, D]``. human: bool ``[N]``, true for the operator's actions. reward: float32 ``[N]``, of
    the next observation. cost: float32 ``[N]``, interventions of the safety filter reported after
    the action, until the next one. terminated: no reward can follow; otherwise the episode was
    truncated. ended: the reason. begins: bool ``[N]``, true for the first executed action of an
    inference. chosen: float32 ``[N, ...]``, what the actor chose instead of actions, 0 where the
    operator acted; ``[N, 0]`` if it chose the actions.
    """

    job: Job
    task: str
    instruction: str
    images: dict[str, Tensor]
    state: Tensor
    tick: Tensor
    action: Tensor
    human: Tensor
    begins: Tensor
    chosen: Tensor
    reward: Tensor
    cost: Tensor
    terminated: bool
    success: bool
    ended: str
    fault: bool = False
    """An error, described by ``ended``, stopped the arm."""
    weights: int = 0
    """Version of the policy's weights."""
    interventions: dict[str, int] = field(default_factory=dict)
    """Interventions of the safety filter, by rule."""

    def __len__(self) -> int:
        return len(self.action)

    def write(self, directory: Path) -> Path:
        """Write the file atomically; it is on the disk when this returns."""
        fields = {name: getattr(self, name) for name in _TENSORS} | {
            f"{IMAGE}{name}": value for name, value in self.images.items()
        }
        about = {"job": asdict(self.job)} | {name: getattr(self, name) for name in _FACTS}
        path = directory / self.job.file
        with replacing(path) as aside:
            save_file(
                {name: value.contiguous() for name, value in fields.items()},
                aside,
                {_ABOUT: json.dumps(about)},
            )
        return path

    @classmethod
    def read(cls, path: Path) -> RobotEpisode:
        """Read an episode file. Raises UserError if it is missing or invalid."""
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
                about: dict[str, Any] = parse_json(file.metadata()[_ABOUT])
            images = {
                name.removeprefix(IMAGE): tensors.pop(name)
                for name in list(tensors)
                if name.startswith(IMAGE)
            }
            return cls(job=Job(**about.pop("job")), images=images, **tensors, **about)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not a valid robot episode file ({error})") from None

    def observation(self, rows: slice = slice(None)) -> Observation:
        state = self.state[rows]
        return Observation(
            {name: value[rows] for name, value in self.images.items()},
            state,
            [self.instruction] * len(state),
        )


_TENSORS = ("state", "tick", "action", "human", "begins", "chosen", "reward", "cost")
_FACTS = (
    "task",
    "instruction",
    "terminated",
    "success",
    "ended",
    "fault",
    "weights",
    "interventions",
)


Prepare = Callable[[Observation], Inputs]
AT_ONCE = 32
"""Observations prepared per batch."""


@torch.no_grad()
def episode_inputs(episode: RobotEpisode, prepare: Prepare) -> Inputs:
    """Apply ``prepare`` to all observations of the episode; return the result on the CPU."""
    parts = []
    for first in range(0, len(episode) + 1, AT_ONCE):
        parts.append(moved(prepare(episode.observation(slice(first, first + AT_ONCE))), CPU))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
