"""Runs of SAC and algorithms derived from it on the counter world, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_vla.algorithms.sac import SAC, SACPolicy
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.off_policy import OffPolicyFlow
from rlinf_vla.testing.toy_env import groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.trainer import Trainer
from tests.runtime.here import off_policy_flow

SETTINGS = Settings(0, 1.0, 2)


def policy(algorithm: SAC, chunk: int = 1) -> SACPolicy:
    return algorithm.wrap(LinearPolicy(LinearOptions(chunk=chunk)), 0)


def flow(
    directory: Path, subject: SACPolicy, trainer: Trainer, algorithm: SAC, state: dict[str, Any]
) -> OffPolicyFlow:
    return off_policy_flow(
        subject, groups(4, 2), trainer, SETTINGS, algorithm, directory / "replay", state
    )


def run(
    directory: Path, algorithm: SAC, iterations: int, stop: int | None = None, chunk: int = 1
) -> tuple[Trainer, list[dict[str, float]], OffPolicyFlow]:
    """``stop``: iterations before a checkpoint; then a process continues and is lost, and another one resumes."""
    metrics: list[dict[str, float]] = []
    state: dict[str, Any] = {}
    checkpoint = None
    for first, last in [(0, iterations)] if stop is None else [(0, stop + 1), (stop, iterations)]:
        subject = policy(algorithm, chunk)
        trainer = Trainer(subject, algorithm, 64)
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, subject, trainer)
        running = flow(directory, subject, trainer, algorithm, state)
        for iteration in range(first, last):
            if iteration == stop and checkpoint is None:
                saved = {"iteration": iteration} | running.save()
                checkpoint = save_checkpoint(directory / "checkpoints", subject, trainer, saved, 3)
            running.begin(iteration)
            algorithm.iteration(running)
            metrics.append(running.metrics)
    return trainer, metrics, running
