"""Dialogues as a vector environment: a control step is a token, an observation a prompt."""

from __future__ import annotations

import random

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from rlinf_vla.core.protocols import EnvSpec, VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult

from ..checks import checked_actions, checked_episodes
from .games import Game

END = "\n"  # of an answer


class Talk:
    """One dialogue. ``most``: tokens after which an answer ends by itself."""

    def __init__(self, game: Game, seed: int, limit: int, most: int) -> None:
        self.dialogue = game(random.Random(seed))  # noqa: S311  (no secrets)
        self.limit = limit
        self.most = most
        self.turn = next(self.dialogue)
        self.said = b""
        self.count = 0
        self.clock = 0
        self.ended = False

    @property
    def prompt(self) -> str:
        """Return the prompt, and what was already written of the answer."""
        return self.turn.prompt + self.said.decode(errors="replace")

    def step(self, token: list[float]) -> tuple[float, bool, bool, bool]:
        """Write a token; return reward, terminated, truncated, success. Zeros write nothing."""
        self.clock += 1
        text = bytes(
            byte
            for byte in (round(min(max(number, 0), 255)) for number in token)
            if byte == ord(END) or byte >= ord(" ")
        )
        written, end, _ = text.partition(END.encode())
        self.said = self.said + written
        self.count = self.count + bool(text)
        success = terminated = False
        if end or self.count == self.most:
            try:
                self.turn = self.dialogue.send(self.said.decode(errors="replace"))
                self.said = b""
                self.count = 0
            except StopIteration as outcome:
                success = outcome.value
                terminated = True
        truncated = not terminated and self.clock == self.limit
        self.ended = terminated or truncated
        return float(success), terminated, truncated, success

    def expert(self) -> int:
        """Return the next byte of the best answer; ends an answer that has gone wrong."""
        best = self.turn.best.encode()
        return (
            best[len(self.said)] if best.startswith(self.said) and best != self.said else ord(END)
        )


class DialogueWorld(VectorEnv):
    """Actions ``[B, C, D]`` are tokens as UTF-8 bytes, padded with zeros. There are no images
    and no state; an instruction is the prompt of whoever speaks next."""

    def __init__(
        self,
        game: Game,
        name: str,
        num_envs: int,
        episode_limit: int,
        token_bytes: int,
        answer_tokens: int,
    ) -> None:
        self.spec = EnvSpec(
            num_envs, token_bytes, 0, 1.0, episode_limit, {}, (name,), torch.device("cpu")
        )
        self._game = game
        self._most = answer_tokens
        self._talks: list[Talk] = []
        self._closed = False

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        """The work is done at once: it is short."""
        rows = checked_episodes(self.spec, episodes, mask)
        seeds = episodes.seed.tolist()
        if self._closed:
            raise RuntimeError("the environment is closed")
        fresh = {
            row: Talk(self._game, seeds[row], self.spec.episode_limit, self._most) for row in rows
        }
        self._talks = [fresh.get(row) or self._talks[row] for row in range(self.spec.num_envs)]

    def reset_wait(self) -> Observation:
        return Observation(
            {}, torch.zeros(self.spec.num_envs, 0), [talk.prompt for talk in self._talks]
        )

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        tokens = checked_actions(self.spec, actions).tolist()
        if not skip_ended and any(talk.ended for talk in self._talks):
            raise RuntimeError("an episode has ended: reset it before the next step")
        reward = torch.zeros(actions.shape[:2])
        flags = torch.zeros(
            4, *reward.shape, dtype=torch.bool
        )  # terminated, truncated, success, valid
        for b, (talk, chunk) in enumerate(zip(self._talks, tokens, strict=True)):
            for c, token in enumerate(chunk):
                if not talk.ended:
                    reward[b, c], *ends = talk.step(token)
                    flags[:, b, c] = torch.tensor([*ends, True])
        self._result = StepResult(self.reset_wait(), reward, *flags)

    def step_wait(self) -> StepResult:
        return self._result

    def render(self, index: int) -> Tensor:
        picture = Image.new("RGB", (256, 32))
        ImageDraw.Draw(picture).text((4, 8), self._talks[index].prompt[-40:])
        return torch.from_numpy(np.array(picture))

    def expert_actions(self) -> Tensor:
        actions = torch.zeros(self.spec.num_envs, self.spec.action_dim)
        actions[:, 0] = torch.tensor([float(talk.expert()) for talk in self._talks])
        return actions

    def close(self) -> None:
        self._closed = True
