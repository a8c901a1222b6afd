"""Report section on success before and after training, with confidence intervals."""

from __future__ import annotations

from html import escape
from typing import Any

from rlinf_vla.telemetry.page import paragraph, section
from rlinf_vla.telemetry.run_files import MODES, Run

MOMENTS = ("before", "after")

_HOW = {"greedy": "with greedy actions", "sampled": "with actions sampled as in training"}
_SCALE = '<div class="scale"><span>0 %</span><span>50 %</span><span>100 %</span></div>'


def success_panel(run: Run) -> str:
    mode = run.headline_mode
    if mode is None:
        return section("Success", "", "Not evaluated yet: the curves below are those of the training rollouts.")
    blocks = {moment: run.evaluations[moment][mode] for moment in MOMENTS if mode in run.evaluations.get(moment, {})}
    content, remark = "", ""
    if blocks:
        arrow = '<div class="arrow" aria-hidden="true">→</div>'
        hero = f'<div class="hero">{arrow.join(_number(moment, block) for moment, block in blocks.items())}</div>'
        rails = "".join(_rails(run, each) for each in MODES)
        content = f'<div class="card">{hero}{_verdict(run, mode)}<div class="intervals">{rails}{_SCALE}</div></div>'
        content += _per_task(blocks)
        remark = f"On {max(block['n_episodes'] for block in blocks.values())} evaluation episodes, {_HOW[mode]}."
    if "after" not in blocks:
        content += paragraph("There is no evaluation after training: the run is in progress, or it stopped before its end.")
    if "before" not in blocks:
        content += paragraph("There is no evaluation before training to compare with.")
    return section("Success", content, remark)


def _number(moment: str, block: dict[str, Any]) -> str:
    low, high = block["pc_success_ci95"]
    return (
        f'<div class="{moment}"><span>{moment} training</span>'
        f'<div class="number">{block["pc_success"]:.1f}<small>%</small></div>'
        f"<span>95 % interval {low:.1f} to {high:.1f}</span></div>"
    )


def _rails(run: Run, mode: str) -> str:
    rows = []
    for moment in MOMENTS:
        block = run.evaluations.get(moment, {}).get(mode)
        if block:
            low, high = block["pc_success_ci95"]
            rows.append(
                f'<div>{moment}</div><div class="rail {moment}"><i style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
                f'<b style="left:{block["pc_success"]:.2f}%"></b></div>'
                f'<div class="value">{block["pc_success"]:.1f} % <em>({block["n_success"]}/{block["n_episodes"]})</em></div>'
            )
    return f'<div class="mode">{mode.capitalize()}</div>{"".join(rows)}' if rows else ""


def _verdict(run: Run, mode: str) -> str:
    """Return the paired comparison of ``evaluation/comparison.json`` as a sentence."""
    result = run.comparison.get(mode)
    if not result:
        return ""
    low, high = result["pc_difference_ci95"]
    p = "p < 0.001" if result["p_value"] < 0.001 else f"p = {result['p_value']:.3f}"
    text = (
        f"On the same {result['n_pairs']} episodes: {result['pc_difference']:+.1f} percentage points "
        f"(95 % interval {low:+.1f} to {high:+.1f}), {result['n_gained']} episodes gained and {result['n_lost']} lost; "
        f"exact McNemar test {p}."
    )
    if low <= 0 <= high:
        text += " The interval includes zero: this many episodes cannot tell the two policies apart."
    return f'<p class="verdict">{escape(text)}</p>'


def _per_task(blocks: dict[str, dict[str, Any]]) -> str:
    tables = {moment: block.get("per_task") or {} for moment, block in blocks.items()}
    tasks = sorted(set().union(*tables.values()))
    if len(tasks) < 2:
        return ""
    heads = "".join(f"<th>{moment}</th>" for moment in tables)
    rows = ""
    for task in tasks:
        cells = "".join(_task_cell(table.get(task)) for table in tables.values())
        rows += f"<tr><th scope=row>{escape(task)}</th>{cells}</tr>\n"
    return f"<div class=scroll><table><thead><tr><th>task</th>{heads}</tr></thead>{rows}</table></div>"


def _task_cell(block: dict[str, Any] | None) -> str:
    if block is None:
        return "<td>–</td>"
    low, high = block["pc_success_ci95"]
    return f"<td>{block['pc_success']:.1f} % <span class=remark>({low:.0f} to {high:.0f})</span></td>"
