from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rlinf_vla.evaluation.video import write_video
from rlinf_vla.features.sweeps.results import tables
from rlinf_vla.telemetry import page
from rlinf_vla.telemetry.evaluation_report import (
    Film,
    differences_table,
    rows,
    success_table,
    write_report,
)

TASKS = {"libero_goal": ("open <the> drawer", "push & pull"), "libero_10": ("make coffee",)}


def document(policies: tuple[str, ...] = ("start", "step_000014")) -> dict[str, Any]:
    episodes = [
        {
            "policy": policy,
            "probe": "none",
            "suite": suite,
            "task": task,
            "seed": seed,
            "instruction": task,
            "success": (seed + place) % 3 > 0,
        }
        for place, policy in enumerate(policies)
        for suite, names in TASKS.items()
        for task in names
        for seed in range(6)
    ]
    suites = [
        {"suite": suite, "tasks": list(names), "stack": {"mujoco": "2.3.7"}}
        for suite, names in TASKS.items()
    ]
    head = {
        "name": "libero_eval",
        "environment": {"cpu": "abacus", "packages": {"torch": "2.13"}},
        "suites": suites,
    }
    provenance = {policy: {"policy": policy, "sha256": "abc123"} for policy in policies}
    return (
        head
        | {
            "provenance": provenance,
            "lost": {"simulators": 2, "processes": 0},
            "recipe": {"env": {"name": "libero"}},
        }
        | tables(episodes)
    )


class Balanced(HTMLParser):
    """Every element is closed and nested."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_rows_end_with_their_sums() -> None:
    names = [(suite, task) for suite, task, _ in rows(document())]
    assert names == [("libero_goal", task) for task in TASKS["libero_goal"]] + [
        ("libero_goal", ""),
        ("libero_10", "make coffee"),
        ("", ""),
    ]
    for suite, _, blocks in rows(document()):
        assert (
            [block["n_episodes"] for block in blocks if block] == [6, 6]
            if suite == "libero_10"
            else blocks
        )


def test_the_page_shows_everything_once_and_escaped(tmp_path: Path) -> None:
    text = write_report(tmp_path, document(), []).read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    for words in (
        "open &lt;the&gt; drawer",
        "push &amp; pull",
        "mujoco",
        "2.3.7",
        "abc123",
        "abacus",
        "2 simulators",
        "start → step_000014",
    ):
        assert words in text, words
    assert "<the>" not in text and "http" not in text
    assert len(re.findall(r"color-mix", text)) == 3 * 2, "a square per task and policy"


def test_one_policy_has_no_differences(tmp_path: Path) -> None:
    assert "Differences" not in write_report(tmp_path, document(("start",)), []).read_text()


def test_videos_up_to_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    films = [
        Film("start", "libero_10", task, tmp_path / f"{task}_{seed}.mp4")
        for task in "ab"
        for seed in range(2)
    ]
    for film in films:
        write_video(film.path, np.zeros((3, 16, 16, 3), np.uint8), 5.0, film.path.stem)
    size = max(film.path.stat().st_size for film in films)
    monkeypatch.setattr(page, "VIDEO_BYTES", 2 * size)
    text = write_report(tmp_path, document(), films).read_text()
    assert [name for name in ("a_0", "b_0", "a_1", "b_1") if name in text] == ["a_0", "b_0"], (
        "every task's first before any's second"
    )
    assert "2 more in videos/" in text
    films[0].path.write_bytes(b"half a film")
    films[1].path.unlink()
    assert "2 more in videos/" in write_report(tmp_path, document(), films).read_text()


def test_the_console_shows_the_same_numbers() -> None:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(success_table(document()))
        console.print(differences_table(document()))
    text = captured.get()
    assert (
        "4/6  66.7 % (30 to 90)" in text and "start → step_000014" in text and "all tasks" in text
    )
