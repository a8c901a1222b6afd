"""`rlinf-vla runs`: list, compare and prune; and short names of runs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.evaluation.statistics import summary
from rlinf_vla.features.sweeps.runs import age, megabytes
from rlinf_vla.runtime import run_names
from rlinf_vla.runtime.run_directory import held, save_recipe
from tests.cli.conftest import CommandLine


def evaluation(path: Path, checkpoint: str, wins: int) -> None:
    rows = [
        {"task": "Push", "seed": seed, "success": seed < wins, "steps": 10, "return": 1.0}
        for seed in range(20)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"checkpoint": checkpoint, "greedy": summary(rows, "task") | {"episodes": rows}})
    )


def made(
    root: Path, name: str, steps: tuple[int, ...] = (), iterations: int = 10, **keys: Any
) -> Path:
    """A run directory, with checkpoints of 2 kB."""
    run = root / "runs" / name
    run.mkdir(parents=True)
    recipe = {
        "name": name.partition("/")[0],
        "iterations": iterations,
        "run_dir": None,
        "algorithm": {"gamma": 0.9} | keys,
    }
    (run / "recipe.yaml").write_text(json.dumps(recipe))
    for step in steps:
        checkpoint = run / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "heads.safetensors").write_bytes(bytes(2000))
        (checkpoint / "COMPLETE").write_text("{}")
    rows = [
        {"step": step, "time": "", "rollout/reward_mean": 0.25 * (i + 1)}
        for i, step in enumerate(steps)
    ]
    rows += [
        {"step": step, "time": "", "eval/success_once": 0.5} for step in steps[-1:]
    ]  # a line of its own, as train writes it
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / ".lock").touch()
    return run


@pytest.fixture
def three(tmp_path: Path) -> dict[str, Path]:
    """A finished run, one that was interrupted and one that never began to train."""
    runs = {
        "finished": made(tmp_path, "ppo/20261101-100000", (5, 10)),
        "interrupted": made(tmp_path, "ppo/20261102-100000", (2, 4, 6), gamma=0.95),
        "failed": made(tmp_path, "sac/20261103-100000"),
    }
    evaluation(runs["finished"] / "evaluation" / "before.json", "iteration 0", 5)
    evaluation(runs["finished"] / "evaluation" / "after.json", "iteration 10", 15)
    evaluation(runs["interrupted"] / "evaluation" / "after.json", "iteration 2", 10)
    return runs


@pytest.fixture
def running(three: dict[str, Path]) -> Iterator[Path]:
    """The run that failed, with its lock held as by a run in progress."""
    with (three["failed"] / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield three["failed"]


def listed(rlinf_vla: CommandLine, *arguments: str) -> dict[str, dict[str, Any]]:
    return {
        each["name"]: each
        for each in json.loads(rlinf_vla("runs", "list", *arguments, "--json").out)
    }


# list


def test_list(rlinf_vla: CommandLine, three: dict[str, Path]) -> None:
    found = listed(rlinf_vla)
    assert list(found) == ["ppo/20261101-100000", "ppo/20261102-100000", "sac/20261103-100000"]
    first, second, third = found.values()
    assert (first["recipe"], first["status"], first["iterations"], first["of_iterations"]) == (
        "ppo",
        "finished",
        10,
        10,
    )
    assert [first["success"][name][0] for name in ("before", "after")] == [25.0, 75.0]
    assert (second["status"], second["iterations"], third["status"], third["iterations"]) == (
        "interrupted",
        6,
        "interrupted",
        0,
    )
    assert (
        4000 < first["size"] < 6000 + second["size"]
        and third["success"] == {}
        and third["age_s"] >= 0
    )
    assert list(listed(rlinf_vla, "sac")) == ["sac/20261103-100000"]


def test_the_table(rlinf_vla: CommandLine, three: dict[str, Path]) -> None:
    for found in (rlinf_vla("runs"), rlinf_vla("runs", "list", "ppo")):
        assert "10/10" in found.out and "25.0 (11.2 to 46.9) % → 75.0 (53.1 to 88.8) %" in found.out
    assert "no runs in" in rlinf_vla("runs", "list", "grpo").out


def test_a_run_in_progress(rlinf_vla: CommandLine, running: Path) -> None:
    assert [each["status"] for each in listed(rlinf_vla).values()] == [
        "finished",
        "interrupted",
        "running",
    ]


def test_two_listings_at_once(rlinf_vla: CommandLine, three: dict[str, Path]) -> None:
    with held(three["interrupted"]) as idle:
        assert idle and listed(rlinf_vla)["ppo/20261102-100000"]["status"] == "interrupted"


def test_a_lock_that_is_a_pipe_does_not_stop_the_list(
    rlinf_vla: CommandLine, three: dict[str, Path]
) -> None:
    lock = three["interrupted"] / ".lock"
    lock.unlink(missing_ok=True)
    os.mkfifo(lock)
    assert listed(rlinf_vla)["ppo/20261102-100000"]["status"] == "interrupted"


def test_a_run_that_its_time_budget_ended_is_finished(
    rlinf_vla: CommandLine, three: dict[str, Path]
) -> None:
    evaluation(three["interrupted"] / "evaluation" / "after.json", "iteration 6", 10)
    assert listed(rlinf_vla)["ppo/20261102-100000"]["status"] == "finished"


def test_a_sweep_and_a_damaged_recipe(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    (made(tmp_path, "sweep/1") / "blocks").mkdir()
    (made(tmp_path, "sweep/2") / "result.json").touch()
    (made(tmp_path, "sweep/3") / "recipe.yaml").write_text("[")
    assert [each["status"] for each in listed(rlinf_vla).values()] == [
        "interrupted",
        "finished",
        "damaged",
    ]


@pytest.mark.parametrize("work", ["control.json", "episodes/0.json"])
def test_a_session_at_a_robot_ends_when_a_person_ends_it(
    rlinf_vla: CommandLine, tmp_path: Path, work: str
) -> None:
    path = made(tmp_path, "franka_rlpd/1") / work
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert [each["status"] for each in listed(rlinf_vla).values()] == ["finished"]


# compare


def test_compare(rlinf_vla: CommandLine, three: dict[str, Path]) -> None:
    found = rlinf_vla("runs", "compare", "20261101", "runs/ppo/20261102-100000")
    assert (
        found.code == 0
        and "algorithm.gamma" in found.out
        and "rollout/reward_mean" in found.out
        and "run_dir" not in found.out
    )
    assert "on the same 20 episodes 0 gained, 5 lost" in found.out
    document = json.loads(rlinf_vla("runs", "compare", "20261101", "20261102", "--json").out)
    first, second = "runs/ppo/20261101-100000", "runs/ppo/20261102-100000"
    assert document["keys"] == {"algorithm.gamma": {first: 0.9, second: 0.95}}
    last = document["runs"][second]["metrics"]
    assert (last["step"], last["rollout/reward_mean"], last["eval/success_once"]) == (6, 0.75, 0.5)
    assert json.loads(rlinf_vla("runs", "compare", "sac", "20261102", "--json").out)["runs"][
        "runs/sac/20261103-100000"
    ] == {"metrics": {}}
    assert document["evaluation"]["differences"][0]["pc_difference"] == -25.0
    assert (
        json.loads(rlinf_vla("runs", "compare", "sac", "20261102", "--json").out)["evaluation"]
        is None
    )


# prune


def test_prune_says_what_it_would_remove(rlinf_vla: CommandLine, three: dict[str, Path]) -> None:
    before = sorted(path for run in three.values() for path in run.rglob("*"))
    found = rlinf_vla("runs", "prune")
    assert (
        found.out.count("would remove runs/") == 4
        and "4 directories" in found.out
        and "give --yes" in found.out
    )
    assert "would remove runs/sac/20261103-100000 (" in found.out
    assert sorted(path for run in three.values() for path in run.rglob("*")) == before


def test_prune_removes_it(rlinf_vla: CommandLine, three: dict[str, Path]) -> None:
    found = json.loads(rlinf_vla("runs", "prune", "--yes", "--keep", "2", "--json").out)
    assert [(each["path"], each["removed"]) for each in found] == [
        ("runs/ppo/20261102-100000/checkpoints/step_000002", True),
        ("runs/sac/20261103-100000", True),
    ]
    assert not three["failed"].exists() and found[0]["size"] == 2002
    left = {path.name for path in three["interrupted"].glob("checkpoints/*")}
    assert left == {"step_000004", "step_000006"}
    assert json.loads(rlinf_vla("runs", "prune", "--yes", "--keep", "2", "--json").out) == []


def test_prune_leaves_a_run_in_progress(rlinf_vla: CommandLine, running: Path) -> None:
    assert rlinf_vla("runs", "prune", "sac", "--yes").out.startswith("0 directories")
    assert running.exists()


@pytest.mark.parametrize(
    "work",
    [
        "blocks/0.json",
        "result.json",
        "episodes/0.json",
        "control.json",
        "replay/0.safetensors",
        "policy/model.safetensors",
    ],
)
def test_prune_leaves_work_without_a_checkpoint(
    rlinf_vla: CommandLine, tmp_path: Path, work: str
) -> None:
    run = made(tmp_path, "ppo/1")
    (run / work).parent.mkdir(exist_ok=True)
    (run / work).touch()
    assert json.loads(rlinf_vla("runs", "prune", "--yes", "--json").out) == []


def test_prune_follows_no_link(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    elsewhere = made(tmp_path / "other", "ppo/1")
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    (tmp_path / "runs" / "ppo" / "1").symlink_to(elsewhere)
    assert (
        json.loads(rlinf_vla("runs", "prune", "--yes", "--json").out) == [] and elsewhere.exists()
    )


# mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["prnue"],
            "runs prnue: no such command; did you mean prune? (commands: list, compare, prune)",
        ),
        (["prune", "--keep", "0"], "--keep 0: must be at least 1"),
        (["prune", "--force"], "runs prune: unrecognized arguments: --force"),
        (["compare", "sac"], "runs compare: the following arguments are required"),
        (["compare", "sac", "20261103"], "is given twice"),
        (["compare", "sac", "nowhere"], "run=nowhere: no such directory, and no run in runs/"),
    ],
)
def test_a_mistake(
    rlinf_vla: CommandLine, three: dict[str, Path], arguments: list[str], words: str
) -> None:
    assert words in rlinf_vla("runs", *arguments).complaint


# names


def test_names_of_runs(
    three: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "sac_big/20261103-110000")
    for name in ("sac", "sac/20261103-100000", "sac/2026", "20261103-100000", "20261103-10"):
        assert run_names.named(name).resolve() == three["failed"]
    for name, newest in (
        ("ppo", "ppo/20261102-100000, ppo/20261101-100000"),
        ("20261103", "sac_big/20261103-110000, sac/20261103-100000"),
    ):
        with pytest.raises(
            UserError, match=f"means 2 runs, give one of them .newest first.: {newest}$"
        ):
            run_names.named(name)


def test_a_name_is_taken_wherever_a_run_is(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "maniskill_ppo" / "20261101-100000"
    run.mkdir(parents=True)
    save_recipe(
        run / "recipe.yaml",
        compose.load("train", ["recipe=maniskill_ppo", "cluster=laptop", "seed=5"]),
    )
    found = rlinf_vla("config", "seed", "run_dir", "run=20261101", "--json")
    assert [each["value"] for each in json.loads(found.out)] == [5, str(run)]
    assert found.err == "run=20261101: runs/maniskill_ppo/20261101-100000\n"


def test_sizes_and_ages() -> None:
    assert (megabytes(1_234_567_890), age(3600), age(3 * 86400)) == (
        "1,234.6 MB",
        "60 min",
        "3 days",
    )
