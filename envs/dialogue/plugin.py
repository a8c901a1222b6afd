"""Implement the dialogue plug-in: the ``env`` node of a recipe, and its environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_vla.config.ranges import Count, EnvCount, Name, Size
from rlinf_vla.core.tasks import Diagnosis, Task

from ..options import divide, one_of
from .games import GAMES

if TYPE_CHECKING:
    from rlinf_vla.core.protocols import VectorEnv


@dataclass
class DialogueConfig:
    """Dialogues with a verifier, in the policy's process: no simulator, images or state."""

    name: Name = "dialogue"
    task: Name = "sums"
    """Kind of dialogue (``rlinf-vla list tasks``)."""
    num_envs: EnvCount = 16
    """Total number of dialogues over all groups."""
    episode_limit: Count = 2
    """Tokens after which an episode is truncated."""
    answer_tokens: Size = 2
    """Tokens after which an answer ends by itself; as many as a policy call writes."""
    token_bytes: Size | None = None
    """Bytes of the longest token; null: the policy's."""


class Dialogue:
    """Implements ``EnvPlugin``."""

    name = "dialogue"
    Config = DialogueConfig

    def create(self, config: DialogueConfig, groups: int) -> list[VectorEnv]:
        from .world import DialogueWorld

        one_of(config.task, GAMES, "env.task")
        count = divide(config.num_envs, groups, "env.num_envs")
        game = GAMES[config.task]
        sizes = count, config.episode_limit, config.token_bytes or 1, config.answer_tokens
        return [DialogueWorld(game, config.task, *sizes) for _ in range(groups)]

    def tasks(self) -> list[Task]:
        return [
            Task(name, (game.__doc__ or "").rstrip("."), available=True, has_expert=True)
            for name, game in GAMES.items()
        ]

    def diagnose(self) -> list[Diagnosis]:
        return [Diagnosis("dialogue", True, "needs nothing")]


plugin = Dialogue()
