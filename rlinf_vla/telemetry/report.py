"""Write ``report.html``: one self-contained page about a run, finished or not."""

from __future__ import annotations

import base64
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from rlinf_vla.core.io import write_text
from rlinf_vla.telemetry import charts
from rlinf_vla.telemetry.console import duration
from rlinf_vla.telemetry.control_panel import control_panel
from rlinf_vla.telemetry.page import collapsible_table, page, panel, paragraph, section
from rlinf_vla.telemetry.run_files import Run, read_run, read_video
from rlinf_vla.telemetry.success_panel import success_panel

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
    "rollout/safety_interventions_per_step": "Limits that changed a command, per step",
}
"""Metric -> title of its chart, in page order; a metric that was not logged has no chart."""

VIDEO_BYTES = 1_900_000
"""Limit on all videos together, before base64 adds a third; keeps the page under 3 MB."""

_WIDE, _NARROW, _PANEL = (8.4, 3.0), (3.5, 2.6), (3.6, 1.85)
_TIMELINE = (8.4, 3.5)


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` atomically from the files present so far; return its path."""
    run = read_run(run_dir)
    # Videos first: _details lists those that cannot be read among the problems.
    videos = _videos(run)
    body = _header(run) + success_panel(run) + control_panel(run.control) + _curves(run) + _timeline(run) + videos + _details(run)
    path = run_dir / "report.html"
    write_text(path, page(f"{run.name}: training report", body), errors="replace")
    return path


def _header(run: Run) -> str:
    facts = []
    if run.began and run.ended:
        day, until = f"{run.began:%d %B %Y, %H:%M}", f"{run.ended:%H:%M}"
        if run.began.date() != run.ended.date():
            until = f"{run.ended:%d %B %Y, %H:%M}"
        facts.append(f"{day.lstrip('0')} to {until.lstrip('0') if len(until) > 5 else until} UTC")
    if run.metrics:
        facts.append(f"{run.metrics[-1]['step']:,} iterations")
    lines = [" · ".join(facts), machine_line(run.environment), _faults(run)]
    text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<header><div class="kind">Training report</div><h1>{escape(run.name)}</h1>{text}</header>\n'


def _faults(run: Run) -> str:
    """Summarise the workers that a cluster run lost and replaced."""
    lost: Counter[str] = Counter()
    longest = 0.0
    for line in run.metrics:
        longest = max(longest, line.get("faults/recovery_s") or 0.0)
        lost.update({name: int(value or 0) for name, value in line.items() if name.startswith("faults/") and name != "faults/recovery_s"})
    parts = [f"{count} {name.removeprefix('faults/')}" for name, count in lost.items() if count]
    return f"Workers lost and replaced: {', '.join(parts)}; the longest recovery took {longest:.1f} s" if parts else ""


def machine_line(environment: dict[str, Any]) -> str:
    if not environment:
        return ""
    gpus = Counter(str(gpu).partition(",")[0] for gpu in environment.get("gpus") or [])
    parts = [f"{count} × {name}" if count > 1 else name for name, count in gpus.items()]
    parts += [str(environment["cpu"])] if environment.get("cpu") else []
    parts += [f"{environment['cores']} cores"] if environment.get("cores") else []
    parts += [f"{environment['memory_gb']:.0f} GB"] if environment.get("memory_gb") else []
    return ", ".join(parts)


def _curves(run: Run) -> str:
    if not run.metrics:
        return section("Learning curves", "", "No iteration has been logged yet.")
    figures = []
    steps, rates = run.series("rollout/success_once")
    evaluations = _evaluation_points(run)
    if steps or evaluations:
        label = "success rate over the iterations"
        drawn = [charts.success_curve(steps, rates, evaluations, label, size) for size in (_WIDE, _NARROW)]
        remark = "rollouts, and their mean over 5 iterations" + ("; dots: evaluations with 95 % intervals" if evaluations else "")
        figures.append(panel("Success", remark, drawn[0], drawn[1]))
    for name, title in CURVES.items():
        steps, values = run.series(name)
        if steps:
            last = f"{values[-1]:,.0f}" if abs(values[-1]) >= 100 else f"{values[-1]:.3g}"
            figures.append(panel(title, f"last {last}", charts.curve(steps, values, title, _PANEL)))
    return section(
        "Learning curves",
        f'<div class="panels">{"".join(figures)}</div>',
        "Everything that was logged is in metrics.jsonl and tensorboard/.",
    )


def _evaluation_points(run: Run) -> list[charts.Evaluation]:
    points = []
    for moment, document in run.evaluations.items():
        block = document.get(run.headline_mode or "")
        if block:
            # The step is part of the file name; "after" belongs to the last logged iteration.
            number = moment.partition("_")[2]
            step = int(number) if number else run.metrics[-1]["step"] if run.metrics and moment == "after" else 0
            rate, (low, high) = block["pc_success"], block["pc_success_ci95"]
            points.append(charts.Evaluation(step, rate / 100, low / 100, high / 100))
    return sorted(points)


def _timeline(run: Run) -> str:
    if not run.timeline:
        return ""
    seconds: dict[str, float] = {}
    for bar in run.timeline:
        seconds[bar.name] = seconds.get(bar.name, 0.0) + bar.end - bar.start
    names = sorted(seconds, key=lambda name: -seconds[name])
    shown = names[: len(charts.SERIES) - 1]
    colours = dict(zip(shown, charts.SERIES, strict=False))
    drawn = [charts.timeline(run.timeline, colours, f"timeline of iteration {run.iteration}", width) for width in _TIMELINE]
    legend = [(name, colours[name]) for name in shown]
    if len(names) > len(shown):
        legend.append((f"{len(names) - len(shown)} others", charts.SERIES[-1]))
    swatches = "".join(f'<span><i style="background:var(--{colour})"></i>{escape(name)}</span>' for name, colour in legend)
    length = duration(max(bar.end for bar in run.timeline))
    chart = panel(f"Iteration {run.iteration}", length, drawn[0], drawn[1], swatches)
    remark = "One iteration; the percentage is the share of it in which a row was busy. To zoom in, open timeline.json in ui.perfetto.dev."
    return section("Timeline of one iteration", chart, remark)


def _videos(run: Run) -> str:
    room, left_out, rows = VIDEO_BYTES, 0, ""
    # Episodes filmed both before and after training come first.
    for episode, files in sorted(run.videos.items(), key=lambda item: (-len(item[1]), item[0])):
        if sum(path.stat().st_size for path in files.values()) > room:
            left_out += 1
            continue
        cells = ""
        for moment in ("before", "after"):
            if moment not in files:
                continue
            try:
                video = read_video(files[moment])
            except Exception as error:  # a partial or missing file must not prevent the rest of the page
                run.problems.append(f"videos/{files[moment].name} could not be read: {error}")
                continue
            room -= len(video.content)
            source = f"data:video/mp4;base64,{base64.b64encode(video.content).decode('ascii')}"
            cells += (
                f'<figure><video controls autoplay loop muted playsinline src="{source}"></video>'
                f"<figcaption><b>{moment.capitalize()}.</b> {escape(video.title or episode)}</figcaption></figure>"
            )
        rows += f'<div class="pair">{cells}</div>' if cells else ""
    remark = f"{left_out} more in videos/, too large for this page." if left_out else ""
    return section("Before and after", rows, remark) if rows or remark else ""


def _details(run: Run) -> str:
    content = ""
    if run.recipe:
        content += collapsible_table("Resolved recipe", run.recipe.items())
    if run.environment:
        content += collapsible_table("Machine and software", flat_rows(run.environment))
    pieces = {
        "evaluation/comparison.json": run.comparison,
        "timeline.json": run.timeline,
        "videos/": run.videos,
        "recipe.yaml": run.recipe,
        "environment.json": run.environment,
    }
    absent = [name for name, piece in pieces.items() if not piece]
    if absent:
        run.problems.append(f"Not in this page, because it is not there or cannot be read: {', '.join(absent)}.")
    return section("Details", content + "".join(map(paragraph, run.problems)))


def flat_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in environment.items():
        for name, each in value.items() if isinstance(value, dict) else [("", value)]:
            shown = " ".join(map(str, each)) if isinstance(each, list) else each
            rows.append((f"{key} {name}".strip(), "–" if shown is None or shown == "" else str(shown)))
    return rows
