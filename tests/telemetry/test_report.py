from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_vla.evaluation.statistics import compare, summary
from rlinf_vla.evaluation.video import write_video
from rlinf_vla.telemetry import page as pages
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.report import write_report
from rlinf_vla.telemetry.timeline import Timeline

HOSTILE = '<script>alert("1")</script> & $x_1$'
VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects the page's external references and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.text = ""
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe")
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]
        self.labels += [value or "" for name, value in attrs if name == "aria-label"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data + " "


def evaluation(greedy: list[bool], sampled: list[bool]) -> dict[str, Any]:
    def block(outcomes: list[bool]) -> dict[str, Any]:
        tasks = [("PushCube", "PullCube")[seed % 2] for seed in range(len(outcomes))]
        episodes = [
            {"task": task, "seed": seed, "success": won}
            for seed, (task, won) in enumerate(zip(tasks, outcomes, strict=True))
        ]
        return {**summary(episodes, "task"), "episodes": episodes}

    return {
        "greedy": block(greedy),
        "sampled": block(sampled),
        "checkpoint": "x",
        "policy_version": 0,
        "environment": {},
    }


def write_evaluation(run_dir: Path, name: str, document: dict[str, Any]) -> None:
    (run_dir / "evaluation").mkdir(exist_ok=True)
    (run_dir / "evaluation" / f"{name}.json").write_text(json.dumps(document))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "maniskill_ppo" / "20261120-120000"
    with MetricsLog(path) as log:
        for step in range(1, 21):
            log.write(
                step,
                {
                    "rollout/success_once": step / 20,
                    "actor/approx_kl": 0.01 if step > 1 else float("nan"),
                    "throughput/steps_per_s": 1234.0 + step,
                },
            )
    before = evaluation([True] * 4 + [False] * 36, [True] * 2 + [False] * 38)
    after = evaluation([False] * 1 + [True] * 35 + [False] * 4, [True] * 30 + [False] * 10)
    write_evaluation(path, "before", before)
    write_evaluation(path, "after", after)
    write_evaluation(
        path, "step_000010", evaluation([True] * 20 + [False] * 20, [True] * 20 + [False] * 20)
    )
    write_evaluation(path, "comparison", compare(before, after))
    timeline = Timeline()
    for iteration in (19, 20):
        timeline.begin_iteration(iteration)
        timeline.add("act", "policy", iteration, iteration + 0.25)
        timeline.add("step", f"simulator {HOSTILE}", iteration + 0.25, iteration + 1.0)
    timeline.write(path / "timeline.json")
    foreseen = Timeline()
    foreseen.add("act", "policy", 0.0, 0.5)
    foreseen.add("publish", "network", 0.5, 1.0)
    foreseen.write(path / "predicted.json")
    frames = np.zeros((8, 32, 32, 3), np.uint8)
    for moment, outcome in (("before", "failure"), ("after", "success")):
        write_video(
            path / "videos" / f"{moment}_PushCube_3.mp4",
            frames,
            10,
            f"push the cube · seed 3 · {outcome} {HOSTILE}",
        )
    (path / "recipe.yaml").write_text(
        f"name: maniskill_ppo\nalgorithm:\n  gamma: 0.97\n  note: '{HOSTILE}'\nenv: {{num_envs: 64}}\n"
    )
    (path / "environment.json").write_text(
        json.dumps(
            {"cpu": "A CPU", "cores": 16, "memory_gb": 128.0, "gpus": ["NVIDIA H200, 1 MiB"] * 2}
        )
    )
    return path


def test_a_finished_run(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = Page(path)
    for text in (
        "maniskill_ppo",
        "20 iterations",
        "2 × NVIDIA H200, A CPU, 16 cores, 128 GB",
        "10.0 %",  # before, greedy
        "87.5 %",  # after, greedy
        "(35/40)",
        "75.0 %",  # after, sampled
        "95 % interval 4.0 to 23.1",
        "On the same 40 episodes: +77.5 percentage points",
        "32 episodes gained and 1 lost",
        "p < 0.001",
        "PullCube",
        "algorithm.gamma",
        "0.97",
        "Iteration 20",
        "push the cube · seed 3 · success",
        "Control steps per second",
        "last 1,254",
        "policy, predicted 50%",
        "network, predicted 50%",
    ):
        assert text in page.text, text
    assert "could not be read" not in page.text and "Not in this page" not in page.text
    assert (
        page.text.count(HOSTILE) >= 4
    )  # shown as text: two captions, the recipe, a track of the timeline
    assert "success rate over the iterations" in page.labels
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []


def test_the_page_is_self_contained(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    videos = [link for link in page.links if link.startswith("data:video/mp4;base64,")]
    assert len(videos) == 2
    assert all(link.startswith("#") for link in page.links if link not in videos)
    assert (
        re.findall(r"url\((?!#)|@import|https?:", re.sub(r"base64,[^\"]*", "", page.source)) == []
    )
    assert set(re.findall(r"var\(--([\w-]+)\)", page.source)) <= set(
        re.findall(r"--([\w-]+):", page.source)
    )
    assert len(page.source) < 300_000


def test_the_same_run_gives_the_same_page(run_dir: Path) -> None:
    assert write_report(run_dir).read_bytes() == write_report(run_dir).read_bytes()


def test_an_empty_directory(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert tmp_path.name in page.text
    assert "Not evaluated yet" in page.text and "No iteration has been logged yet" in page.text
    assert "Not in this page, because it is not there" in page.text


def test_an_unfinished_run(run_dir: Path) -> None:
    for gone in (
        "evaluation/after.json",
        "evaluation/comparison.json",
        "videos/after_PushCube_3.mp4",
        "timeline.json",
    ):
        (run_dir / gone).unlink()
    page = Page(write_report(run_dir))
    assert "There is no evaluation after training" in page.text
    assert "10.0 %" in page.text and "87.5" not in page.text
    assert "seed 3 · failure" in page.text
    assert "evaluation/comparison.json, timeline.json" in page.text


def test_evaluations_during_training_only(run_dir: Path) -> None:
    for gone in ("before", "after", "comparison"):
        (run_dir / "evaluation" / f"{gone}.json").unlink()
    page = Page(write_report(run_dir))
    assert "There is no evaluation after training" in page.text and "dots: evaluations" in page.text


def test_different_modes_before_and_after_are_not_compared(run_dir: Path) -> None:
    """The headline is for the mode that was evaluated both times."""
    document = json.loads((run_dir / "evaluation" / "before.json").read_text())
    del document["greedy"]
    write_evaluation(run_dir, "before", document)
    write_evaluation(
        run_dir,
        "comparison",
        compare(document, json.loads((run_dir / "evaluation" / "after.json").read_text())),
    )
    page = Page(write_report(run_dir))
    assert "actions sampled as in training" in page.text
    assert "+70.0 percentage points" in page.text


def test_no_difference_is_reported_as_such(run_dir: Path) -> None:
    before = json.loads((run_dir / "evaluation" / "before.json").read_text())
    write_evaluation(run_dir, "after", before)
    write_evaluation(run_dir, "comparison", compare(before, before))
    assert "cannot tell the two policies apart" in Page(write_report(run_dir)).text


def test_damaged_parts_are_reported_and_the_rest_is_shown(run_dir: Path) -> None:
    (run_dir / "evaluation" / "after.json").write_text('{"greedy": {"n_episodes"')
    (run_dir / "evaluation" / "step_000010.json").write_text('{"greedy": {"n_episodes": 3}}')
    (run_dir / "timeline.json").write_text("[]")
    (run_dir / "recipe.yaml").write_text("a: [")
    (run_dir / "environment.json").write_bytes(b"\xff\xfe")
    video = run_dir / "videos" / "after_PushCube_3.mp4"
    video.write_bytes(video.read_bytes()[:100])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "ti')
    page = Page(write_report(run_dir))
    for name in (
        "evaluation/after.json",
        "evaluation/step_000010.json",
        "timeline.json",
        "recipe.yaml",
        "environment.json",
        video.name,
    ):
        assert f"{name} could not be read" in page.text, name
    assert "20 iterations" in page.text and "seed 3 · failure" in page.text
    assert "20261120-120000" in page.text  # the recipe's name is lost with the recipe


def test_large_runs_stay_small(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in range(21, 8000):
            line = {
                "step": step,
                "time": "2026-11-20T12:00:00+00:00",
                "rollout/success_once": random.random(),
            }
            file.write(json.dumps(line | {"actor/entropy": random.random()}) + "\n")
    timeline = Timeline()
    timeline.begin_iteration(8000)
    for index in range(10_000):
        timeline.add(
            f"stage {index % 12}", f"worker {index % 6}", index * 0.01, index * 0.01 + 0.009
        )
    timeline.write(run_dir / "timeline.json")
    (run_dir / "predicted.json").unlink()
    size = sum(path.stat().st_size for path in (run_dir / "videos").iterdir())
    monkeypatch.setattr(pages, "VIDEO_BYTES", size - 1)
    page = Page(write_report(run_dir))
    assert "1 more in videos/" in page.text and "5 others" in page.text
    assert len(page.source) < 1_500_000


def test_lost_workers_of_a_cluster_are_reported(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"faults/rollout": 2.0, "faults/reward": 0.0, "faults/recovery_s": 1.5})
        log.write(2, {"faults/rollout": 1.0, "faults/reward": 1.0, "faults/recovery_s": 4.25})
    told = "Workers lost and replaced: 3 rollout, 1 reward; the longest recovery took 4.2 s"
    assert told in Page(write_report(tmp_path)).text


def test_probes_are_beside_the_success(run_dir: Path) -> None:
    document = evaluation([True] * 30 + [False] * 10, [True] * 40)
    difference = {"pc_difference": -25.0, "pc_difference_ci95": [-37.5, -12.5]}
    document["greedy"]["probes"] = {"blank_image": document["sampled"] | {"difference": difference}}
    write_evaluation(run_dir, "after", document)
    text = Page(write_report(run_dir)).text
    assert (
        "after training, with" in text
        and "blank_image" in text
        and "-25.0 (-37.5 to -12.5)" in text
    )
