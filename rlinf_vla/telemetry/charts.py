"""Draw the report's charts as small, self-contained inline SVG in the colours of the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from rlinf_vla.telemetry.timeline import Span, busy_seconds

Size = tuple[float, float]
"""(width, height) in inches of 72 CSS pixels; text is 9 pixels high at this size."""

SERIES = tuple(f"series-{i}" for i in range(8))
"""Page colours for categories distinguished by colour alone; the last one is for all others."""

# Matplotlib accepts fixed colours only. It draws with these placeholders, which _svg replaces with
# CSS variables of the page, so the same SVG suits a light and a dark page.
_ROLES = ("ink", "muted", "line", "accent", "before", *SERIES)
_COLOUR = {role: f"#0000{0xA0 + i:02x}" for i, role in enumerate(_ROLES)}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text elements: smaller than outlines, searchable, in the page's font
    "svg.hashsalt": "rlinf-vla",  # the same data gives the same file
    "text.parse_math": False,  # a name may contain a dollar sign
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "axes.edgecolor": _COLOUR["line"],
    "axes.labelcolor": _COLOUR["muted"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _COLOUR["line"],
    "grid.linewidth": 0.6,
    "xtick.color": _COLOUR["line"],
    "ytick.color": _COLOUR["line"],
    "xtick.labelcolor": _COLOUR["muted"],
    "ytick.labelcolor": _COLOUR["muted"],
    "ytick.major.size": 0,
    "xtick.major.size": 3,
}
_MOST_POINTS = 500
_BAR = 15.0
"""Height of a timeline bar, in pixels."""


class Evaluation(NamedTuple):
    """One evaluation on the success curve: success rate and its confidence interval in [0, 1]."""

    step: int
    rate: float
    low: float
    high: float


def curve(steps: Sequence[int], values: Sequence[float], label: str, size: Size) -> str:
    """Plot one metric over the iterations; NaN leaves a gap. ``label`` is the text alternative."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(size)
        x, y = thin(steps, values)
        axes.plot(
            x,
            y,
            color=_COLOUR["accent"],
            linewidth=1.3,
            marker="o" if len(x) < 3 else "",
            markersize=3,
        )
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("iteration")
        return _svg(figure, label)


def success_curve(
    steps: Sequence[int],
    rates: Sequence[float],
    evaluations: Sequence[Evaluation],
    label: str,
    size: Size,
) -> str:
    """Plot rollout success, its trailing mean, and the evaluations."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(size)
        drawn = ((rates, 0.8, 0.35), (trailing_mean(rates), 2.0, 1.0)) if rates else ()
        for values, width, alpha in drawn:
            x, y = thin(steps, values)
            axes.plot(x, y, color=_COLOUR["accent"], linewidth=width, alpha=alpha)
        if evaluations:
            rate = np.array([evaluation.rate for evaluation in evaluations])
            reach = np.array(
                [
                    [evaluation.rate - evaluation.low, evaluation.high - evaluation.rate]
                    for evaluation in evaluations
                ]
            ).T
            reach = np.maximum(
                reach, 0.0
            )  # rounding can put a stored rate slightly outside its interval
            axes.errorbar(
                [evaluation.step for evaluation in evaluations], rate, reach,
                fmt="o", color=_COLOUR["ink"], markersize=4.5, elinewidth=1.1, capsize=2.5, zorder=3, clip_on=False,
            )  # fmt: skip
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        axes.set_xlabel("iteration")
        return _svg(figure, label)


def histogram(
    edges: Sequence[float], counts: Sequence[int], limit: float, label: str, size: Size
) -> str:
    """Plot counts between consecutive edges on a symlog scale; a dashed line marks ``limit``."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(size)
        width = edges[1] - edges[0]
        colours = [_COLOUR["accent"] if edge < limit else _COLOUR["series-3"] for edge in edges]
        axes.bar(edges, counts, width=0.9 * width, align="edge", color=colours)
        axes.axvline(limit, color=_COLOUR["ink"], linewidth=0.8, linestyle="--")
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel(label)
        return _svg(figure, label)


def timeline(bars: Sequence[Span], colours: Mapping[str, str], label: str, width: float) -> str:
    """Plot one row per track, in order of first appearance, labelled with its busy share.

    Times are seconds since the timeline's start, ``width`` is in inches. ``colours`` maps a name to
    one of ``SERIES``; other names get the last one.
    """
    tracks = list(dict.fromkeys(bar.track for bar in bars))
    finish = max(1e-6, *(bar.end for bar in bars))
    rows = [f"{track}  {busy_seconds(bars, track) / finish:.0%}" for track in tracks]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes((width, 0.5 + 1.4 * _BAR / 72 * len(tracks)))
        ranges: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for bar in bars:
            ranges.setdefault((bar.name, bar.track), []).append((bar.start, bar.end))
        # Long spans (least start - end) first, so that spans nested in them are drawn on top.
        for name, track in sorted(
            ranges,
            key=lambda pair: (float(np.mean(np.subtract(*np.transpose(ranges[pair])))), pair),
        ):
            spans = _merged(ranges[name, track], finish / 500)
            # Thick strokes with gaps: one path holds all bars of a name on a track.
            x = [edge for start, length in spans for edge in (start, start + length, float("nan"))]
            colour = _COLOUR[colours.get(name, SERIES[-1])]
            axes.plot(
                x,
                [tracks.index(track)] * len(x),
                color=colour,
                linewidth=_BAR,
                solid_capstyle="butt",
            )
        axes.set_yticks(range(len(tracks)), rows)
        axes.set_ylim(len(tracks) - 0.5, -0.5)
        axes.set_xlim(0, finish)
        axes.tick_params(axis="y", labelcolor=_COLOUR["ink"])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds")
        return _svg(figure, label)


def _axes(size: Size) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure, axes


def thin(
    steps: Sequence[int], values: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Average equal blocks of iterations (the last may be shorter) to at most ``_MOST_POINTS``.

    NaN does not count; a block is NaN if it holds nothing else.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    block = -(-len(x) // _MOST_POINTS)
    if block <= 1:
        return x, y
    padded = np.full((2, -(-len(x) // block), block), np.nan)
    padded.reshape(2, -1)[:, : len(x)] = x, y
    thinned = np.ma.masked_invalid(padded).mean(axis=2).filled(np.nan)
    return thinned[0], thinned[1]


def trailing_mean(values: Sequence[float], window: int = 5) -> NDArray[np.float64]:
    """Return the mean of the last ``window`` values at each of them; NaN does not count."""
    padded = np.concatenate([np.full(window - 1, np.nan), np.asarray(values, np.float64)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)
    return np.ma.masked_invalid(windows).mean(axis=1).filled(np.nan)


def _merged(ranges: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return (start, length) of the ranges, joined where the distance is below ``gap`` > 0."""
    joined: list[list[float]] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] < gap:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return [(start, max(end - start, gap)) for start, end in joined]


def _svg(figure: Figure, label: str) -> str:
    """Serialise for one shared page: no prologue, no unused ids, coordinates to 1/100 pixel."""
    buffer = StringIO()
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(
        r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL
    )
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(
        r' id="([^"]*)"', lambda match: match.group() if match.group(1) in used else "", text
    )
    text = re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match.group()), text)
    for role, colour in _COLOUR.items():
        text = text.replace(colour, f"var(--{role})")
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box is not None
    opening = f'<svg {view_box.group()} role="img" aria-label="{escape(label)}">'
    return opening + re.sub(r"\n\s*", "\n", text[text.index(">") + 1 :])
