"""Draw a comparison: success rates, performance profiles and times to success of each method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROW_IN = 0.3
"""Height of a method's row, in inches."""


def write_figure(methods: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Write the figure. ``methods``: that entry of ``compare.comparison``."""
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "rlinf-vla",
            "svg.fonttype": "none",
            "text.parse_math": False,
            "font.size": 9,
        }
    ):
        figure = Figure(figsize=(11, max(3.2, 1.4 + ROW_IN * len(methods))), layout="constrained")
        rates, profiles, times = figure.subplots(1, 3)
        for row, (name, summary) in enumerate(methods.items()):
            colour = f"C{row % 10}"
            low, high = summary["pc_success_ci95"]
            rates.plot([low, high], [row, row], color=colour, linewidth=2)
            rates.plot(summary["pc_success"], row, "o", color=colour)
            profile = summary["profile"]
            profiles.plot(profile["pc_threshold"], profile["pc_above"], color=colour, label=name)
            if profile["pc_above_ci95"] is not None:
                profiles.fill_between(
                    profile["pc_threshold"],
                    *profile["pc_above_ci95"],
                    color=colour,
                    alpha=0.2,
                    linewidth=0,
                )
            times.plot(
                summary["time_to_success"]["steps"],
                summary["time_to_success"]["pc_solved"],
                color=colour,
                label=name,
            )
        rates.set_yticks(range(len(methods)), list(methods))
        rates.set_ylim(len(methods) - 0.5, -0.5)
        _percent(rates, "x", "success, 95 % interval", "episodes solved (%)")
        _percent(
            profiles, "y", "performance profile", "runs and tasks above τ (%)", "success rate τ (%)"
        )
        _percent(times, "y", "time to success", "episodes solved (%)", "control steps")
        profiles.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _percent(axes: Axes, scale: str, title: str, label: str, other: str = "") -> None:
    """Label ``axes``, whose ``scale`` (x or y) is in percent."""
    axes.set(
        **{
            "title": title,
            f"{scale}label": label,
            f"{scale}lim": (-2, 102),
            f"{scale}ticks": range(0, 101, 20),
        }
    )
    axes.set(**{"ylabel" if scale == "x" else "xlabel": other})
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
