"""One gradient step of SAC, on a batch that the test gives."""

from __future__ import annotations

import torch

from rlinf_vla.algorithms.sac import SAC
from rlinf_vla.core.transitions import Transitions
from rlinf_vla.training.trainer import Trainer


def sac_step(
    trainer: Trainer,
    batch: Transitions,
    generator: torch.Generator,
    with_actor: bool = False,
    shown: Transitions | None = None,
    iteration: int = 0,
) -> dict[str, float]:
    """``with_actor``: one of the updates in which actor and alpha learn, too. ``shown``: what the actor imitates."""
    algorithm = trainer.settings
    assert isinstance(algorithm, SAC) and algorithm.config.actor_every > 1

    def drawn() -> Transitions:
        assert shown is not None
        return shown

    return algorithm.step(trainer, batch, generator, iteration, 0 if with_actor else 1, drawn)
