"""Evaluate a policy on the fixed episodes, into JSON and videos: shared by ``train`` (before and after) and ``eval``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_vla.atomic import write_json
from rlinf_vla.commands import session
from rlinf_vla.evaluation.statistics import summary
from rlinf_vla.evaluation.sweep import EpisodeResult, sweep
from rlinf_vla.evaluation.video import annotate, write_video
from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.recipe import Recipe
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.lora import acting

Sweep = Callable[[float, int, Callable[[float], None]], list[EpisodeResult]]
"""The recipe's evaluation episodes at a temperature, so many of them filmed; progress is told."""


def sweep_here(recipe: Recipe, policy: Policy, groups: Sequence[VectorEnv]) -> Sweep:
    def play(temperature: float, filmed: int, progress: Callable[[float], None]) -> list[EpisodeResult]:
        actor = Actor(policy, session.actor_settings(recipe, temperature))
        with acting(policy, actor.settings.rounded):
            return sweep(actor, groups, range(recipe.episodes), Timeline(), filmed, progress)

    return play


def evaluate(
    recipe: Recipe,
    play: Sweep,
    calls_per_s: float,
    name: str,
    checkpoint: str,
    policy_version: int,
    run_dir: Path,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Play ``recipe.episodes`` episodes in every mode; writes evaluation/NAME.json and videos/NAME_*.mp4 and returns the JSON.

    ``calls_per_s``: policy calls per second of the episodes' own time; a film shows one frame of each.
    """
    document: dict[str, Any] = {"checkpoint": checkpoint, "policy_version": policy_version, "environment": fingerprint()}
    for mode in recipe.evaluation.modes:
        temperature = recipe.rollout.temperature if mode == "sampled" else 0.0
        filmed = recipe.evaluation.filmed if mode == recipe.evaluation.modes[0] else 0

        def report(fraction: float, mode: str = mode) -> None:
            progress(f"{name} ({mode})", fraction)

        results = play(temperature, filmed, report)
        document[mode] = block(results, temperature)
        for result in results[:filmed]:
            film(result, run_dir / "videos" / f"{name}_{result.task}_{result.seed}.mp4", calls_per_s)
    write_json(run_dir / "evaluation" / f"{name}.json", document)
    return document


def block(results: Sequence[EpisodeResult], temperature: float) -> dict[str, Any]:
    episodes = []
    for result in results:
        episode = {name: value for name, value in asdict(result).items() if name not in ("frames", "episode_return")}
        episodes.append(episode | {"return": result.episode_return})
    counts = summary([result.success for result in results], [result.task for result in results])
    return {"temperature": temperature} | counts | {"episodes": episodes}


def headline(document: dict[str, Any]) -> str:
    """``41.5 % sampled (95 % interval 34.9 to 48.4), 38.0 % greedy (...)``"""
    parts = []
    for mode in ("sampled", "greedy"):
        if mode in document:
            low, high = document[mode]["pc_success_ci95"]
            parts.append(f"{document[mode]['pc_success']:.1f} % {mode} (95 % interval {low:.1f} to {high:.1f})")
    return ", ".join(parts)


def film(result: EpisodeResult, path: Path, fps: float) -> None:
    """Its frames as a video whose title says what is seen."""
    outcome = "success" if result.success else "no success"
    title = f"{result.task}, seed {result.seed}: {result.instruction} ({outcome} after {result.steps} steps)"
    frames = [
        annotate(frame.cpu().numpy(), [result.instruction, f"call {i + 1}" + (f", {outcome}" if i + 1 == len(result.frames) else "")])
        for i, frame in enumerate(result.frames)
    ]
    write_video(path, frames, fps, title)
