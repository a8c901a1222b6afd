"""Write ``report.html``: one self-contained page about a training run, finished or not."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from rlinf_vla.telemetry import charts, control_timing, diagnosis
from rlinf_vla.telemetry.console import duration
from rlinf_vla.telemetry.page import machine_line, read_videos, write_page
from rlinf_vla.telemetry.run_files import MOMENTS, Run, read_run
from rlinf_vla.telemetry.timeline import Span

CURVES = {
    "sft/loss": "Imitation loss",
    "rollout/reward_mean": "Mean reward per control step",
    "critic/return_mean": "Mean return",
    "actor/approx_kl": "Approximate KL divergence",
    "actor/clip_fraction": "Clip fraction",
    "actor/entropy": "Entropy of the policy",
    "critic/explained_variance": "Explained variance (critic)",
    "throughput/steps_per_s": "Control steps per second",
    "rollout/human_share": "Share of steps by the human operator",
    "rollout/held_share": "Share of control periods in which the arm was held",
    "rollout/cost_per_episode": "Changes by safety limits, per episode",
    "actor/cost_multiplier": "Penalty for each such change",
    "rollout/safety_interventions_per_step": "Limits that changed a command, per step",
}
"""Metric -> title of its chart, in page order; a metric that was not logged has no chart."""

_SUCCESS = ((8.4, 3.0), (3.5, 2.6))
_PANEL = (3.6, 1.85)
"""Sizes of charts in inches; of two, the first is for wide screens and the second for phones."""
_TIMELINE = (8.4, 3.5)
"""Widths in inches."""


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` atomically from the files present so far; return its path."""
    run = read_run(run_dir)
    videos, left_out, unreadable = read_videos(_films(run))
    run.problems += unreadable
    return write_page(
        run_dir / "report.html",
        "training.html",
        **content(run),
        curves=_curves(run),
        videos=videos,
        left_out=left_out,
    )


def content(run: Run) -> dict[str, Any]:
    """Return what every page about the run shows, but for curves and videos."""
    headline = {
        moment: run.evaluations.get(moment, {}).get(run.headline_mode or "") for moment in MOMENTS
    }
    blocks = {moment: block for moment, block in headline.items() if block}
    return {
        "kind": "Training report",
        "name": run.name,
        "header": [_facts(run), machine_line(run.environment), _faults(run)],
        "run": run,
        "blocks": blocks,
        "tasks": sorted(
            {task for block in blocks.values() for task in block.get("per_task") or {}}
        ),
        "control": control_timing.section(run.control),
        "verdicts": diagnosis.verdicts(run),
        "timeline": _timeline(run),
    }


def _facts(run: Run) -> str:
    """Return when the run took place and how many iterations it has."""
    if not run.metrics:
        return ""
    try:
        began, ended = (
            datetime.fromisoformat(line["time"]) for line in (run.metrics[0], run.metrics[-1])
        )
    except (KeyError, TypeError, ValueError):  # the curves are shown all the same
        return f"{run.metrics[-1]['step']:,} iterations"
    until = (
        f"{ended:%H:%M}" if began.date() == ended.date() else f"{ended.day} {ended:%B %Y, %H:%M}"
    )
    return (
        f"{began.day} {began:%B %Y, %H:%M} to {until} UTC · {run.metrics[-1]['step']:,} iterations"
    )


def _faults(run: Run) -> str:
    """Summarise the workers that a cluster run lost, and the episodes that were cut."""
    lost: Counter[str] = Counter()
    longest = 0.0
    for line in run.metrics:
        longest = max(longest, line.get("faults/recovery_s") or 0.0)
        lost.update(
            {
                name: int(value or 0)
                for name, value in line.items()
                if name.startswith("faults/") and name != "faults/recovery_s"
            }
        )
    cut = lost.pop("faults/episodes", 0)
    parts = [f"{count} {name.removeprefix('faults/')}" for name, count in lost.items() if count]
    sentences = (
        [
            f"Workers lost and replaced: {', '.join(parts)}; the longest recovery took {longest:.1f} s"
        ]
        if parts
        else []
    )
    sentences += [f"Episodes cut because a simulator failed: {cut} (faults.jsonl)"] if cut else []
    return ". ".join(sentences)


def _curves(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return title, remark and charts of the success curve and of each logged metric of CURVES."""
    curves = []
    steps, rates = run.series("rollout/success_once")
    evaluations = evaluation_points(run)
    if steps or evaluations:
        drawn = [
            charts.success_curve(
                steps, rates, evaluations, "success rate over the iterations", size
            )
            for size in _SUCCESS
        ]
        remark = "rollouts, and their mean over 5 iterations" + (
            "; dots: evaluations with 95 % intervals" if evaluations else ""
        )
        curves.append(("Success", remark, drawn))
    for name, title in CURVES.items():
        steps, values = run.series(name)
        if steps:
            last = f"{values[-1]:,.0f}" if abs(values[-1]) >= 100 else f"{values[-1]:.3g}"
            curves.append((title, f"last {last}", [charts.curve(steps, values, title, _PANEL)]))
    return curves


def evaluation_points(run: Run) -> list[charts.Evaluation]:
    """Return the evaluations in the headline's mode, by iteration."""
    points = []
    for moment, document in run.evaluations.items():
        block = document.get(run.headline_mode or "")
        if block:
            # The step is part of the file name; "after" belongs to the last logged iteration.
            number = moment.partition("_")[2]
            step = (
                int(number)
                if number
                else run.metrics[-1]["step"]
                if run.metrics and moment == "after"
                else 0
            )
            rate, (low, high) = block["pc_success"], block["pc_success_ci95"]
            points.append(charts.Evaluation(step, rate / 100, low / 100, high / 100))
    return sorted(points)


def _timeline(run: Run) -> dict[str, Any]:
    """Return length, charts and legend of the latest iteration; empty without a timeline.

    A predicted track lies below the recorded track of the same name.
    """
    if not run.timeline:
        return {}
    tracks = dict.fromkeys(span.track for span in (*run.timeline, *run.predicted))
    spans = [span for track in tracks for span in _beside(run, track)]
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
    longest = sorted(seconds, key=lambda name: -seconds[name])[: len(charts.SERIES) - 1]
    colours = dict(zip(longest, charts.SERIES, strict=False))
    others = (
        [(f"{len(seconds) - len(longest)} others", charts.SERIES[-1])]
        if len(seconds) > len(longest)
        else []
    )
    return {
        "length": duration(max(span.end for span in run.timeline)),
        "charts": [
            charts.timeline(spans, colours, f"timeline of iteration {run.iteration}", width)
            for width in _TIMELINE
        ],
        "legend": [*colours.items(), *others],
    }


def _beside(run: Run, track: str) -> list[Span]:
    """Return a track's recorded spans, then the predicted ones under another name."""
    recorded = [span for span in run.timeline if span.track == track]
    return recorded + [
        span._replace(track=f"{track}, predicted") for span in run.predicted if span.track == track
    ]


def _films(run: Run) -> list[list[tuple[Path, str, str]]]:
    """Return the videos of each episode; episodes filmed both before and after come first."""
    episodes = sorted(
        run.videos.items(), key=lambda item: (-len(item[1].keys() & set(MOMENTS)), item[0])
    )
    return [
        [(files[moment], moment.capitalize(), episode) for moment in MOMENTS if moment in files]
        for episode, files in episodes
    ]
