"""The table of learning proofs, with runs that were not trained."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.runtime import recipes

TOOL = Path(__file__).parents[1] / "studies" / "prove_all.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("prove_all", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prove_all", module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    return module


def evaluated(won: int) -> dict[str, Any]:
    """The greedy policy succeeds in ten more episodes."""
    task = {"task": "push", "steps": 3}
    modes = {"sampled": won, "greedy": won + 10}
    return {
        mode: {"episodes": [{**task, "seed": seed, "success": seed < count} for seed in range(100)]}
        for mode, count in modes.items()
    }


def finish(run: Any, after: int, before: int = 30) -> None:
    """Leaves what a training leaves."""
    folder = run.directory / "evaluation"
    folder.mkdir(parents=True)
    for name, document in {
        "before": evaluated(before),
        "after": evaluated(after),
        "comparison": {},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    lines = [{"step": step, "rollout/success_once": step / 20} for step in range(12)]
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_every_proof_has_a_recipe_and_a_name_of_its_own(tool: ModuleType) -> None:
    assert len({tool.slug(name) for name in tool.PROOFS}) == len(tool.PROOFS)
    assert tool.STARTS.keys() <= tool.PROOFS.keys()
    for keys in (*tool.PROOFS.values(), *tool.STARTS.values()):
        recipe = recipes.read(compose.load("train", list(keys)))
        assert recipe.evaluation.before_and_after and recipe.episodes >= 100


def test_a_proof_without_a_packaged_start_trains_one_first(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        trained.append(command[command.index("train") :])
        place = next(
            Path(each.removeprefix("run_dir=")) for each in command if each.startswith("run_dir=")
        )
        (place / "policy").mkdir(parents=True)

    monkeypatch.setattr(tool.subprocess, "run", run)
    for seed in (0, 1):
        tool.Run("GRPO, LIBERO object 1", seed).train()
    start, *others = trained
    assert "recipe=libero_sft" in start and "env.tasks=[1]" in start
    place = next(each for each in start if each.startswith("run_dir=")).removeprefix("run_dir=")
    assert [f"model.checkpoint={place}/policy" in each for each in others] == [True, True]
    assert [f"seed={seed}" in each for seed, each in enumerate(others)] == [True, True]


def test_the_table_fills_and_a_finished_run_is_not_repeated(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[Any] = []

    def train(run: Any) -> None:
        begun.append((run.proof, run.seed))
        if run.seed == 2:
            raise tool.subprocess.CalledProcessError(1, "train")
        finish(run, 62 if run.proof.startswith("PPO") else 35)

    monkeypatch.setattr(tool.Run, "train", train)
    page = tmp_path / "docs" / "results" / "learning.md"
    page.parent.mkdir(parents=True)
    monkeypatch.setattr(
        sys, "argv", ["prove_all.py", "--page", str(page), "ppo_pushcube", "grpo_pushcube"]
    )
    finish(tool.Run("PPO, PushCube", 0), 60)
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 1, "one seed of each failed"
    assert begun == [
        ("GRPO, PushCube", 0),
        ("PPO, PushCube", 1),
        ("GRPO, PushCube", 1),
        ("PPO, PushCube", 2),
        ("GRPO, PushCube", 2),
    ]
    rows = page.read_text().splitlines()
    sampled, greedy = (
        line for line in rows if line.startswith("| PPO, PushCube | 2 of 3 seeds, one failed | ")
    )
    assert (
        "| sampled | 30.0 %" in sampled
        and "| 61.0 %" in sampled
        and ": 60.0, 62.0 | +31.0 (" in sampled
        and "disjoint" in sampled
    )
    assert (
        "| greedy | 40.0 %" in greedy
        and "| 71.0 %" in greedy
        and ": 70.0, 72.0 | +31.0 (" in greedy
    )
    assert any(": 35.0, 35.0 | +5.0 (" in line and "overlapping" in line for line in rows)
    assert any(line.startswith("| SAC, PushCube | 0 of 3 seeds |") for line in rows)
    assert (page.parent.parent / "images" / "learning" / "ppo_pushcube.svg").exists()


def test_each_seed_is_compared_with_its_own_start(tool: ModuleType) -> None:
    """The policy is the same, but its samples are others."""
    for seed, (before, after) in enumerate([(30, 60), (40, 61)]):
        finish(tool.Run("PPO, PushCube", seed), after, before)
    sampled = next(
        tool.rows("PPO, PushCube", 2, set(), tool.results("PPO, PushCube", 2, tool.Store(None)))
    )
    assert "| 35.0 %" in sampled and "| 60.5 %" in sampled and ": 60.0, 61.0 | +25.5 (" in sampled


def test_seeds_of_several_machines_make_one_row(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "docs" / "results" / "learning.md"
    page.parent.mkdir(parents=True)
    runs = [tool.Run("PPO, PushCube", seed) for seed in range(3)]
    for run, won in zip(runs, (60, 70, 80), strict=True):
        finish(run, won)
    expected = [line for line in tool.table(3, set(), tool.Store(None)) if "PPO, PushCube" in line]
    for run in runs:  # each machine has one of them
        others = [
            each.directory / "evaluation" / "comparison.json" for each in runs if each is not run
        ]
        for path in others:
            path.rename(path.with_suffix(".hidden"))
        tool.write(page, 3, set())
        for path in others:
            path.with_suffix(".hidden").rename(path)
    text = page.read_text()
    figure = page.parent.parent / "images" / "learning" / "ppo_pushcube.svg"
    assert (
        expected == [line for line in text.splitlines() if "| PPO, PushCube" in line]
        and "60.0, 70.0, 80.0" in text
    )
    assert figure.read_text().count("<!-- seed ") == 3
    begun: list[Any] = []
    monkeypatch.setattr(tool.Run, "train", lambda run: begun.append(run))
    for run in runs:
        (run.directory / "evaluation" / "comparison.json").unlink()
    arguments = ["prove_all.py", "--page", str(page), "ppo_pushcube"]
    for more, trained in (["--missing"], []), ([], runs):
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        with pytest.raises(SystemExit):
            tool.main()
        assert begun == trained
    monkeypatch.setitem(tool.PROOFS, "PPO, PushCube", ("recipe=maniskill_ppo", "seed=7"))
    assert tool.Store(page).load("PPO, PushCube") == {}, "results of other keys"


def test_rows_whose_seeds_were_not_stored_are_kept(tool: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results" / "learning.md"
    page.parent.mkdir(parents=True)
    for seed in range(2):
        finish(tool.Run("PPO, PushCube", seed), 60)
    finish(tool.Run("SAC, PushCube", 0), 40)
    tool.write(page, 3, set())
    before = page.read_text()
    for path in tool.RUNS.rglob("comparison.json"):
        path.unlink()
    shutil.rmtree(page.with_suffix(""))
    finish(tool.Run("GRPO, PushCube", 0), 90)
    tool.write(page, 3, set())
    after = page.read_text().splitlines()
    assert {
        line for line in before.splitlines() if "PPO, PushCube" in line or "SAC, PushCube" in line
    } <= {*after}, "rows and figures"
    assert any(line.startswith("| GRPO, PushCube | 1 of 3") for line in after)
