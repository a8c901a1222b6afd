"""Evaluate a policy on the fixed episodes and write JSON and videos, for ``train`` and ``eval``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlinf_vla.config.recipe import MODES, Recipe
from rlinf_vla.core.io import write_json
from rlinf_vla.evaluation.statistics import count_cut, paired_episodes, summary
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult
from rlinf_vla.runtime.base import PlayEpisodes
from rlinf_vla.runtime.run_directory import evaluation_file
from rlinf_vla.telemetry.environment import fingerprint


def evaluate(
    recipe: Recipe,
    play: PlayEpisodes,
    calls_per_s: float,
    name: str,
    checkpoint: str,
    policy_version: int,
    run_dir: Path,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Run ``recipe.episodes`` episodes in every evaluation mode and return the JSON document.

    Writes it to evaluation/NAME.json, and videos to videos/NAME_*.mp4. ``calls_per_s``: policy
    calls per second of simulated time; a video has one frame per call. ``probes`` of a mode: for
    each of ``evaluation.probes`` the same counts, and the paired ``difference`` that it makes.
    """
    document: dict[str, Any] = {
        "checkpoint": checkpoint,
        "policy_version": policy_version,
        "environment": fingerprint(),
    }
    for mode in recipe.evaluation.modes:
        temperature = temperature_of(recipe, mode)
        filmed = recipe.evaluation.filmed if mode == recipe.evaluation.modes[0] else 0
        results = play(temperature, filmed, partial(progress, f"{name} ({mode})"), None)
        rows = [result.row() for result in results]
        costs = [row["cost"] for row in rows if "cost" in row]
        mean = {"cost_per_episode": sum(costs) / len(costs)} if costs else {}
        probes = {}
        for probe in recipe.evaluation.probes:
            probed = [
                result.row()
                for result in play(
                    temperature, 0, partial(progress, f"{name} ({mode}, {probe})"), probe
                )
            ]
            probes[probe] = _counts(probed) | {
                "difference": paired_episodes(rows, probed),
                "episodes": probed,
            }
        document[mode] = (
            {"temperature": temperature}
            | _counts(rows)
            | mean
            | ({"probes": probes} if probes else {})
            | {"episodes": rows}
        )
        for result in results[:filmed]:
            film(
                result, run_dir / "videos" / f"{name}_{result.task}_{result.seed}.mp4", calls_per_s
            )
    write_json(evaluation_file(run_dir, name), document)
    return document


def _counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return summary(sorted(rows, key=itemgetter("task")), "task")


def temperature_of(recipe: Recipe, mode: str | None) -> float:
    """Return the temperature of an evaluation mode."""
    if mode != "sampled":
        return 0.0
    chosen = recipe.evaluation.temperature
    return recipe.rollout.temperature if chosen is None else chosen


def rates(document: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation: rate and 95 % interval of each mode, as fractions."""
    metrics: dict[str, float] = {}
    for mode, name in (("sampled", "eval/success_once"), ("greedy", "eval/success_once_greedy")):
        if mode in document:
            low, high = document[mode]["pc_success_ci95"]
            metrics |= {
                name: document[mode]["pc_success"] / 100,
                f"{name}_low": low / 100,
                f"{name}_high": high / 100,
            }
    return metrics


def headline(document: dict[str, Any]) -> str:
    """Return e.g. ``41.5 % sampled (95 % interval 34.9 to 48.4), 38.0 % greedy (...)``.

    After each mode follows the paired difference that each probe makes.
    """
    parts = []
    for mode in MODES:
        if mode in document:
            low, high = document[mode]["pc_success_ci95"]
            parts.append(
                f"{document[mode]['pc_success']:.1f} % {mode} (95 % interval {low:.1f} to {high:.1f})"
            )
            if cut := count_cut(document[mode]["episodes"]):
                parts.append(f"{cut} episodes cut because the simulator failed")
            for probe, result in document[mode].get("probes", {}).items():
                low, high = result["difference"]["pc_difference_ci95"]
                parts.append(
                    f"{probe} {result['difference']['pc_difference']:+.1f} points ({low:+.1f} to {high:+.1f})"
                )
    return ", ".join(parts)


def film(result: EpisodeResult, path: Path, fps: float) -> None:
    """Write an episode's frames as a video, with task, seed and outcome in its title."""
    from rlinf_vla.evaluation.video import annotate, write_video

    outcome = "success" if result.success else "no success"
    title = f"{result.task}, seed {result.seed}: {result.instruction} ({outcome} after {result.steps} steps)"
    frames = [
        annotate(
            frame.cpu().numpy(),
            [
                result.instruction,
                f"call {i + 1}" + (f", {outcome}" if i + 1 == len(result.frames) else ""),
            ],
        )
        for i, frame in enumerate(result.frames)
    ]
    write_video(path, frames, fps, title)
