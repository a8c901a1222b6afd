"""Change what a policy observes, to measure how much of its success uses language or vision.

Episodes, states and what is rendered for viewers are unchanged, so that results with and without a
probe are of the same episodes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlinf_vla.config.recipe import (
    BLANK_IMAGE,
    BLANK_INSTRUCTION,
    FROZEN_IMAGE,
    PROBES,
    SHUFFLED_INSTRUCTION,
)
from rlinf_vla.core.protocols import VectorEnv, WrappedEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult
from rlinf_vla.rollout.actor import rows_chosen
from rlinf_vla.rollout.noise import WORD_ORDER, CounterNoise

GREY = 128
"""Value of all pixels of a blank image."""


def shuffled(instruction: str, episode: Episodes) -> str:
    """Return the words in an order drawn from ``episode`` (of one row), which is another order.

    Instructions whose words are all equal are returned as they are.
    """
    words = instruction.split()
    draw = CounterNoise(
        0, episode.task_id.cpu(), episode.seed.cpu(), torch.zeros(1, dtype=torch.int64), WORD_ORDER
    )
    shuffled_words = (
        [words[index] for index in draw.words(len(words))[0].argsort(stable=True).tolist()]
        if words
        else []
    )
    return " ".join(
        shuffled_words[1:] + shuffled_words[:1] if shuffled_words == words else shuffled_words
    )


class ProbedEnv(WrappedEnv):
    """Wrap ``env`` so that a policy observes what ``probe`` leaves of it; one of PROBES."""

    def __init__(self, env: VectorEnv, probe: str) -> None:
        super().__init__(env)
        assert probe in PROBES
        self._probe = probe

    _episodes: Episodes
    _fresh: Tensor
    """bool ``[B]``: the environments of the last reset."""
    _first: Observation | None = None
    """The first observation of each episode."""

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        self._fresh = torch.ones(len(episodes), dtype=torch.bool) if mask is None else mask.cpu()
        self._episodes = (
            episodes if mask is None else Episodes.where(mask, episodes, self._episodes)
        )
        super().reset_async(episodes, mask)

    def reset_wait(self) -> Observation:
        observation = super().reset_wait()
        if self._probe == FROZEN_IMAGE:  # a copy: simulators may overwrite what they have shown
            self._first = rows_chosen(self._fresh, observation, self._first or observation)
        return self._probed(observation)

    def step_wait(self) -> StepResult:
        result = super().step_wait()
        return replace(result, observation=self._probed(result.observation))

    def _probed(self, observation: Observation) -> Observation:
        if self._probe == BLANK_INSTRUCTION:
            return replace(observation, instruction=[""] * len(observation.instruction))
        if self._probe == SHUFFLED_INSTRUCTION:
            rows = [self._episodes[row : row + 1] for row in range(len(self._episodes))]
            return replace(
                observation,
                instruction=[
                    shuffled(*pair) for pair in zip(observation.instruction, rows, strict=True)
                ],
            )
        kinds = (observation.images, observation.jpeg)
        if self._probe == BLANK_IMAGE:
            images, jpeg = (
                {name: torch.full_like(image, GREY) for name, image in kind.items()}
                for kind in kinds
            )
        else:
            assert self._first is not None
            images, jpeg = self._first.images, self._first.jpeg
        return replace(observation, images=images, jpeg=jpeg)
