"""A cost limit from the command line: its multiplier is part of a run, and interventions fall at equal success."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import announce
from tests.cli.runs import assert_same_files, checkpoint, metrics
from tests.features.planner.made_up import profile
from tests.forked import Forked

ROOT = Path(__file__).parents[2]
LIMITS = ("env.tool_m=0.1", "rollout.limits.translation=1.0")
LIMITED = (
    *LIMITS,
    "algorithm.cost_limit=1",
    "algorithm.cost_rate=0.02",
    "algorithm.cost_initial=0.01",
)
QUICK = ("evaluation.before_and_after=false", "iterations=4", "checkpoints.keep=9")
RECIPES = ("counting_ppo", "counting_grpo", "counting_sac")


def state(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / "checkpoints" / f"step_{step:06d}" / "state.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_continues_with_its_multiplier(
    train: Any, rlinf_vla: CommandLine, tmp_path: Path, recipe: str
) -> None:
    whole, parts = (train(name, *LIMITED, *QUICK, recipe=recipe) for name in ("whole", "parts"))
    multiplier = 0.01
    for step, line in enumerate(metrics(whole), 1):
        multiplier = max(0.0, multiplier + 0.02 * (line["rollout/cost_per_episode"] - 1))
        assert (
            line["actor/cost_multiplier"]
            == pytest.approx(multiplier)
            == state(whole, step)["cost_multiplier"]
        )
    for step in (3, 4):
        (parts / "checkpoints" / f"step_{step:06d}").rename(tmp_path / f"lost_{step}")
    assert "continuing after iteration 2" in rlinf_vla("train", "run=parts").out
    assert_same_files(whole, parts, 4)
    assert metrics(parts) == metrics(whole)


def test_the_penalty_changes_what_is_learnt(train: Any) -> None:
    free, limited = train("free", *LIMITS, *QUICK), train("limited", *LIMITED, *QUICK)
    first, other = checkpoint(free, 1), checkpoint(limited, 1)
    assert any((first[name] != other[name]).any() for name in first)
    assert (
        "cost_multiplier" not in state(free, 1) and "rollout/cost_per_episode" in metrics(free)[0]
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_interventions_fall_at_equal_success(train: Any, seed: int) -> None:
    """Long actions succeed, and the limit shortens them; a move along one axis is no longer than 1, and succeeds as well."""
    longer = (
        "iterations=20",
        "env.num_envs=16",
        "algorithm.minibatch_size=64",
        "algorithm.epochs=4",
        "episodes=60",
        f"seed={seed}",
    )
    quicker = (
        "rollout.pipeline_depth=1",
        "rollout.batch_size=16",
        "algorithm.learning_rate=0.003",
        "model.lora.rank=0",
        "reward=success",
    )
    settings = (
        *longer,
        *quicker,
        *LIMITS,
        "checkpoints.every=20",
        "evaluation.filmed=0",
        "evaluation.modes=[sampled]",
    )
    limit = ("algorithm.cost_limit=1", "algorithm.cost_initial=0.1", "algorithm.cost_rate=0.02")
    runs = {"free": train("free", *settings), "limited": train("limited", *settings, *limit)}
    after = {
        name: json.loads((run / "evaluation" / "after.json").read_text())["sampled"]
        for name, run in runs.items()
    }
    before = json.loads((runs["free"] / "evaluation" / "before.json").read_text())["sampled"]
    for each in (before, *after.values()):
        assert each["cost_per_episode"] == pytest.approx(
            sum(row["cost"] for row in each["episodes"]) / 60
        )
    assert before["pc_success"] < 50 and before["cost_per_episode"] > 3, (
        "the filter acts in every episode"
    )
    assert after["limited"]["cost_per_episode"] < 0.25 * after["free"]["cost_per_episode"]
    assert after["free"]["pc_success"] > 90 and after["limited"]["pc_success"] > 90


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_on_ray(counting: Counting, forked: Forked, tmp_path: Path, recipe: str) -> None:
    """Two rollout workers give the same bits; two trainer ranks, too, but for the rounding of sums."""
    announce(tmp_path / "package")
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{tmp_path / 'package'}:{ROOT}"}
    on_ray = ("cluster.runtime=ray", "cluster.rollout_workers=2", "rollout.pipeline_depth=1")
    for name, more in (
        ("here", ()),
        ("there", on_ray),
        ("ranks", (*on_ray, "cluster.trainer_ranks=2")),
    ):
        arguments = counting.arguments(
            "train", recipe, *LIMITED, *QUICK, "reward=success", f"run_dir={name}", *more
        )
        done = forked(arguments, tmp_path, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same_files(tmp_path / "here", tmp_path / "there", 4)
    assert state(tmp_path / "here", 4)["cost_multiplier"] > 0.01, "it climbed"
    assert state(tmp_path / "ranks", 4)["cost_multiplier"] == pytest.approx(
        state(tmp_path / "here", 4)["cost_multiplier"], rel=0.1
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_has_a_plan(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, recipe: str
) -> None:
    profile(chunk=2, episode_limit=6).write(tmp_path / "known.json")
    known = (
        () if recipe == "counting_sac" else ("run_dir=plan", f"profile={tmp_path / 'known.json'}")
    )
    plain, limited = (
        rlinf_vla(*counting.arguments("plan", recipe, *known, *more)) for more in ((), LIMITED)
    )
    assert limited.code == 0, limited.out + limited.err
    assert limited.out.split() == plain.out.split(), "a penalty costs no time"


def test_mistakes_are_one_line(rlinf_vla: CommandLine, counting: Counting) -> None:
    def complaint(*overrides: str, recipe: str = "counting_ppo", verb: str = "train") -> str:
        return rlinf_vla(*counting.arguments(verb, recipe, *overrides)).complaint

    for recipe in RECIPES:
        told = complaint("algorithm.cost_limit=1", recipe=recipe)
        assert (
            told
            == "algorithm.cost_limit=1.0: nothing counts a cost here, set rollout.limits or learn at a robot"
        )
    assert "do not move a tool" in complaint("rollout.limits.translation=1.0")
    assert "do not rotate" in complaint("env.tool_m=0.1", "rollout.limits.rotation=1.0")
    for box in ("[0,0,0,1,1]", "[0,0,0,1,-1,1]"):
        assert complaint("env.tool_m=0.1", f"rollout.limits.workspace={box}").startswith(
            "rollout.limits.workspace=["
        )
    for key in ("algorithm.cost_limit", "algorithm.cost_rate", "algorithm.cost_initial"):
        assert complaint(f"{key}=-1").startswith(key)
    assert complaint("rollout.limits.translation=0").startswith("rollout.limits.translation=0")
    assert "rollout.limits is for one policy" in complaint(
        *LIMITS, "sweep.policies=[start]", verb="eval"
    )
