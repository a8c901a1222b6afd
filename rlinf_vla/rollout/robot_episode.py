"""An episode at a robot as it happened: what was seen, done, by whom and when; in one file, and as records for a replay."""

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

from rlinf_vla.algorithms.sac import ACTED, ACTION, DISCOUNT, REWARD
from rlinf_vla.atomic import replacing
from rlinf_vla.rollout.transitions import Recorded
from rlinf_vla.types import Inputs, Observation, Tensors, UserError

TRAINING, EVALUATION, DEMONSTRATION = "training", "evaluation", "demonstration"
IMAGE = "image."
_ABOUT = "about"


@dataclass(frozen=True)
class Job:
    """An episode to be played. kind: TRAINING, EVALUATION or DEMONSTRATION, whose ``number``-th it is. scripted: by the scene's own expert,
    unless a person acts. temperature: of the policy's sampling, 0 is greedy. weights: of which version the policy shall at least be."""

    kind: str
    number: int
    seed: int
    scripted: bool = False
    temperature: float = 1.0
    weights: int = 0

    @property
    def file(self) -> str:
        return f"{self.kind}_{self.number:06d}.safetensors"


@dataclass(frozen=True)
class RobotEpisode:
    """``N`` executed steps, each at an observation, and the observation at the end, in which nothing was done that counts.

    images: uint8 ``[N + 1, H, W, 3]`` by camera. state: float32 ``[N + 1, 8]``. tick: int64 ``[N + 1]``, control periods since the
    beginning; where the arm was held, some are missing. action: float32 ``[N, D]``. human: bool ``[N]``, a person's. reward:
    float32 ``[N]``, of what was seen next. terminated: it is over, and nothing is worth anything after it; else it was cut. ended: why.
    """

    job: Job
    task: str
    instruction: str
    images: dict[str, Tensor]
    state: Tensor
    tick: Tensor
    action: Tensor
    human: Tensor
    reward: Tensor
    terminated: bool
    success: bool
    ended: str
    fault: bool = False
    """Something went wrong, which ``ended`` names; the arm was stopped."""
    weights: int = 0
    """Version of the policy that acted."""
    interventions: dict[str, int] = field(default_factory=dict)
    """Of the safety filter, by rule."""

    def __len__(self) -> int:
        return len(self.action)

    def write(self, directory: Path) -> Path:
        """Whole or not at all, and on the disk when this returns."""
        fields = {name: getattr(self, name) for name in _TENSORS} | {f"{IMAGE}{name}": value for name, value in self.images.items()}
        about = {"job": asdict(self.job)} | {name: getattr(self, name) for name in _FACTS}
        path = directory / self.job.file
        with replacing(path) as aside:
            save_file({name: value.contiguous() for name, value in fields.items()}, aside, {_ABOUT: json.dumps(about)})
        return path

    @classmethod
    def read(cls, path: Path) -> RobotEpisode:
        """Raises UserError where there is none."""
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
                about: dict[str, Any] = json.loads(file.metadata()[_ABOUT])
            images = {name.removeprefix(IMAGE): tensors.pop(name) for name in list(tensors) if name.startswith(IMAGE)}
            return cls(job=Job(**about.pop("job")), images=images, **tensors, **about)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} holds no episode of a robot ({error})") from None

    def observation(self, rows: slice = slice(None)) -> Observation:
        state = self.state[rows]
        return Observation({name: value[rows] for name, value in self.images.items()}, state, [self.instruction] * len(state))


_TENSORS = ("state", "tick", "action", "human", "reward")
_FACTS = ("task", "instruction", "terminated", "success", "ended", "fault", "weights", "interventions")


def recorded(episode: RobotEpisode, inputs: Inputs, gamma: float) -> Recorded:
    """Its records; ``inputs`` of its ``N + 1`` observations, each tensor ``[N + 1, ...]``. It has at least one step.

    An action is discounted by ``gamma`` to the power of the control periods until the next one: time in which the arm was held costs
    what time costs.
    """
    return _part(episode, inputs, gamma, 0, len(episode))


def shown_by_a_person(episode: RobotEpisode, inputs: Inputs, gamma: float) -> list[Recorded]:
    """What a person did without interruption, each as an episode of its own, which is cut where the policy went on."""
    edges = torch.diff(episode.human.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, ends = (torch.nonzero(edges == each)[:, 0].tolist() for each in (1, -1))
    return [_part(episode, inputs, gamma, start, end) for start, end in zip(starts, ends, strict=True)]


def _part(episode: RobotEpisode, inputs: Inputs, gamma: float, start: int, end: int) -> Recorded:
    """Steps from ``start`` to before ``end``."""
    terminated = episode.terminated and end == len(episode)
    waited = torch.diff(episode.tick[start : end + 1])
    acted: Tensors = {
        ACTION: episode.action[start:end, None],
        REWARD: episode.reward[start:end].clone(),
        DISCOUNT: gamma ** waited.float(),
        ACTED: torch.ones(end - start, dtype=torch.bool),
    }
    if terminated:
        acted[DISCOUNT][-1] = 0
    else:
        acted = {name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in acted.items()}
    rows = slice(start, end + (not terminated))
    device = next(iter(inputs.values())).device
    records = {name: value[rows] for name, value in inputs.items()} | {name: value.to(device) for name, value in acted.items()}
    return Recorded(records, episode.success and end == len(episode), end - start)


Prepare = Callable[[Observation], Inputs]
AT_ONCE = 32
"""Observations that are prepared together."""


@torch.no_grad()
def prepared(episode: RobotEpisode, prepare: Prepare, device: torch.device) -> Inputs:
    """``prepare`` of all of its observations."""
    parts = []
    for first in range(0, len(episode) + 1, AT_ONCE):
        seen = episode.observation(slice(first, first + AT_ONCE))
        images = {name: value.to(device) for name, value in seen.images.items()}
        parts.append(prepare(Observation(images, seen.state.to(device), seen.instruction)))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
