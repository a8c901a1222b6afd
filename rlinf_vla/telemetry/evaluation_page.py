"""Write a sweep's ``report.html``: tables, heat map, differences, videos and provenance."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from av.error import FFmpegError

from rlinf_vla.core.io import write_text
from rlinf_vla.telemetry.evaluation_table import difference, p_value, rows
from rlinf_vla.telemetry.page import collapsible_table, page, paragraph, section
from rlinf_vla.telemetry.report import VIDEO_BYTES, flat_rows, machine_line
from rlinf_vla.telemetry.run_files import Video, read_video


class Film(NamedTuple):
    policy: str
    suite: str
    task: str
    path: Path


def write_page(directory: Path, document: dict[str, Any], films: Sequence[Film]) -> Path:
    """Write ``directory/report.html`` atomically; ``document`` has the contents of result.json."""
    body = _header(document) + _success(document) + _heat_map(document) + _differences(document) + _films(films) + _details(document)
    path = directory / "report.html"
    write_text(path, page(f"{document['name']}: evaluation", body), errors="replace")
    return path


def _header(document: dict[str, Any]) -> str:
    tasks = sum(len(part["tasks"]) for part in document["suites"])
    counts = {block["n_episodes"] for block in document["policies"].values()}
    episodes = " or ".join(f"{count:,}" for count in sorted(counts))
    lost = [f"{count} {what}" for what, count in document["lost"].items() if count]
    lines = [
        f"{len(document['policies'])} policies on {tasks} tasks, {episodes} episodes each",
        machine_line(document["environment"]),
        f"Lost and replaced: {', '.join(lost)}" if lost else "",
    ]
    text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<header><div class="kind">Evaluation</div><h1>{escape(document["name"])}</h1>{text}</header>\n'


def _success(document: dict[str, Any]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in document["policies"])
    lines = "".join(
        f"<tr{'' if task else ' class=total'}><th scope=row>{escape(suite or 'all')}</th><td>{escape(task or 'all tasks')}</td>"
        f"{''.join(map(_cell, blocks))}</tr>\n"
        for suite, task, blocks in rows(document)
    )
    table = f"<div class=scroll><table><thead><tr><th>suite</th><th>task</th>{heads}</tr></thead>{lines}</table></div>"
    return section("Success", table, "Success rate with its 95 % Wilson interval, and successful episodes out of all.")


def _cell(block: dict[str, Any] | None) -> str:
    if block is None:
        return "<td>–</td>"
    low, high = block["pc_success_ci95"]
    return (
        f"<td>{block['pc_success']:.1f} % <span class=remark>({low:.0f} to {high:.0f}), "
        f"{block['n_success']}/{block['n_episodes']}</span></td>"
    )


def _heat_map(document: dict[str, Any]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in document["policies"])
    lines = "".join(
        f"<tr><th scope=row>{escape(suite)}: {escape(task)}</th>{''.join(map(_warmth, blocks))}</tr>\n"
        for suite, task, blocks in rows(document)
        if task
    )
    return section("Task by task", f'<div class=scroll><table class="heat"><thead><tr><th></th>{heads}</tr></thead>{lines}</table></div>')


def _warmth(block: dict[str, Any] | None) -> str:
    if block is None:
        return "<td></td>"
    rate = block["pc_success"]
    return f'<td style="background:color-mix(in srgb, var(--accent) {0.85 * rate:.0f}%, var(--card))">{rate:.0f}</td>'


def _differences(document: dict[str, Any]) -> str:
    if not document["differences"]:
        return ""
    lines = "".join(
        f"<tr><th scope=row>{escape(each['before'])} → {escape(each['after'])}</th><td>{escape(each['suite'] or 'all')}</td>"
        f"<td>{each['n_pairs']}</td><td>{each['n_gained']}</td><td>{each['n_lost']}</td><td>{difference(each)}</td><td>{p_value(each)}</td>"
        f"</tr>\n"
        for each in document["differences"]
    )
    names = ("policies", "suite", "pairs", "gained", "lost", "points", "p")
    heads = "".join(f"<th>{name}</th>" for name in names)
    remark = "On the same episodes: percentage points with Newcombe's paired 95 % interval, and p of the exact McNemar test."
    table = f"<div class=scroll><table><thead><tr>{heads}</tr></thead>{lines}</table></div>"
    return section("Differences", table, remark)


def _films(films: Sequence[Film]) -> str:
    """Embed up to VIDEO_BYTES of videos: one per policy and task before any second one."""
    room, left_out, cells = VIDEO_BYTES, 0, ""
    turns: dict[tuple[str, str, str], int] = {}
    order = []
    for film in films:
        turn = turns[film[:3]] = turns.get(film[:3], -1) + 1
        order.append((turn, film))
    for _, film in sorted(order, key=lambda pair: pair[0]):
        video = _read(film.path, room)
        if video is None:
            left_out += 1
            continue
        room -= len(video.content)
        source = f"data:video/mp4;base64,{base64.b64encode(video.content).decode('ascii')}"
        cells += (
            f'<figure><video controls loop muted playsinline src="{source}"></video>'
            f"<figcaption><b>{escape(film.policy)}.</b> {escape(video.title or film.task)}</figcaption></figure>"
        )
    remark = "Of each policy and task, failures before successes." + (f" {left_out} more in videos/." if left_out else "")
    return section("Films", f'<div class="panels">{cells}</div>', remark) if cells or left_out else ""


def _read(path: Path, room: int) -> Video | None:
    """Return the video, or None if it is larger than ``room`` or cannot be read."""
    try:
        return read_video(path) if path.stat().st_size <= room else None
    except (OSError, ValueError, FFmpegError):
        return None


def _details(document: dict[str, Any]) -> str:
    content = collapsible_table("Machine and software", flat_rows(document["environment"]))
    for part in document["suites"]:
        content += collapsible_table(
            f"Simulator of {part['suite']}: {_few(part['tasks'])}", flat_rows({k: v for k, v in part.items() if k != "tasks"})
        )
    for name, policy in document["provenance"].items():
        content += collapsible_table(f"Policy {name}", flat_rows(policy))
    content += collapsible_table("Recipe", [(key, json.dumps(value, ensure_ascii=False)) for key, value in _leaves("", document["recipe"])])
    return section("Made on", content + paragraph("Every episode is in result.json and episodes.csv."))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _leaves(prefix: str, node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [leaf for key, value in node.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else str(key), value)]
    return [(prefix, node)]
