"""``run=DIR``: a command takes its recipe from a run, as a user sees it, on counter world."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlinf_vla.cli import compose
from rlinf_vla.cli import list as list_command
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime import recipes, run_directory
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import CommandLine, Counting
from tests.cli.runs import assert_same_files, metrics

QUICK = ("evaluation.before_and_after=false", "evaluation.filmed=0")
OVERRIDES = (
    *QUICK,
    "iterations=4",
    "seed=7",
    "rollout.temperature=0.8",
    "model.lora.rank=3",
    "episodes=6",
)
"""Overrides that the recipe's file does not contain."""

Train = Callable[..., Path]


@pytest.fixture
def train(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Train:
    """Trains in a run directory of that name."""
    monkeypatch.setattr("rlinf_vla.telemetry.report.write_report", lambda directory: directory)

    def run(name: str, *overrides: str, recipe: str = "counting_ppo") -> Path:
        found = rlinf_vla(*counting.arguments("train", recipe, f"run_dir={name}", *overrides))
        assert found.code == 0, found.out + found.err
        return tmp_path / name

    return run


@pytest.fixture
def kept(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> Path:
    """A run directory that contains only its recipe."""
    verb, *words = counting.arguments("train", "counting_ppo", "cluster.micro_batch_size=7")
    (tmp_path / "run").mkdir()
    run_directory.save_recipe(
        tmp_path / "run" / "recipe.yaml", compose.load(verb, compose.with_folder(words))
    )
    return tmp_path / "run"


def forget(run_dir: Path, after: int) -> None:
    """Like a run that was killed before it wrote the checkpoints after that iteration."""
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > after:
            path.rename(run_dir / f"never_written_{path.name}")


# train


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("counting_ppo", ()),
        ("counting_sac", ("model.lora.rank=0",)),
        ("counting_sft", ("model.lora.rank=0", "algorithm.decay_steps=4")),
    ],
)
def test_a_run_resumes_with_its_saved_recipe(
    train: Train, rlinf_vla: CommandLine, name: str, more: tuple[str, ...]
) -> None:
    """No recipe file and no override is needed, and its last checkpoint equals that of an undisturbed run."""
    whole = train("whole", *OVERRIDES, *more, "checkpoints.keep=9", recipe=name)
    parts = train("parts", *OVERRIDES, *more, "checkpoints.keep=9", recipe=name)
    forget(parts, after=2)
    found = rlinf_vla("train", "run=parts")
    assert (
        found.code == 0
        and "continuing after iteration 2 from parts/checkpoints/step_000002" in found.out
    ), found.out + found.err
    assert_same_files(parts, whole, 4)
    assert metrics(parts) == metrics(whole)
    forget(parts, after=4)
    assert rlinf_vla("train", f"run={parts}/checkpoints/step_000003", "iterations=5").code == 0
    assert [path.name for path in sorted((parts / "checkpoints").iterdir())][-1] == "step_000005"


def test_a_run_without_a_checkpoint_starts_again_with_a_message(
    train: Train, rlinf_vla: CommandLine
) -> None:
    whole, parts = train("whole", *OVERRIDES), train("parts", *OVERRIDES)
    forget(parts, after=0)
    found = rlinf_vla("train", "run=parts")
    assert found.code == 0 and "no complete checkpoint" in found.out, found.out + found.err
    assert_same_files(parts, whole, 4)


def test_a_run_without_a_checkpoint_keeps_its_first_evaluation(
    train: Train, rlinf_vla: CommandLine
) -> None:
    """It is not made again, so its line must stay; those of the iterations are written again."""
    run = train("run", "evaluation.filmed=0")
    before = read_metrics(run)
    forget(run, after=0)
    (run / "evaluation" / "after.json").unlink()
    found = rlinf_vla("train", "run=run")
    assert found.code == 0 and "before: success" not in found.out, found.out + found.err
    after = read_metrics(run)
    assert (
        [line["step"] for line in after] == [0, 1, 2, 2]
        and after[0] == before[0]
        and "eval/success_once" in after[0]
    )


def test_the_saved_recipe_can_start_another_run(
    train: Train, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    first = train("first", *OVERRIDES)
    found = rlinf_vla("train", "run=first", "run_dir=second", "resume=never")
    assert found.code == 0, found.err
    assert_same_files(tmp_path / "second", first, 4)


def test_overrides_that_would_change_the_run_are_refused(
    train: Train, rlinf_vla: CommandLine
) -> None:
    train("run", *QUICK)
    assert "resume: seed was 0" in rlinf_vla("train", "run=run", "seed=1").complaint
    assert "holds a run already" in rlinf_vla("train", "run=run", "resume=never").complaint


# eval and export


def evaluated(run_dir: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "evaluation" / f"{name}.json").read_text())
    return {mode: document[mode] for mode in ("sampled", "greedy")} | {
        "policy_version": document["policy_version"]
    }


@pytest.mark.slow
def test_an_evaluation_needs_no_repeated_overrides(
    train: Train, rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    run = train("run", *OVERRIDES)
    typed = [each for each in OVERRIDES if each not in QUICK]
    for step, location in ((4, "run"), (3, "run/checkpoints/step_000003"), (4, "run/")):
        checkpoint = f"checkpoint=run/checkpoints/step_{step:06d}"
        assert (
            rlinf_vla(
                *counting.arguments("eval", "counting_ppo", *typed, checkpoint, "run_dir=typed")
            ).code
            == 0
        )
        expected = evaluated(tmp_path / "typed", f"step_{step:06d}")
        found = rlinf_vla("eval", f"run={location}")
        assert found.code == 0 and f"success of step_{step:06d} in 6 episodes" in found.out, (
            found.err
        )
        assert evaluated(run, f"step_{step:06d}") == expected
    named = rlinf_vla(
        "eval",
        "run=run",
        "checkpoint=run/checkpoints/step_000002",
        "episodes=2",
        "run_dir=elsewhere",
    )
    assert named.code == 0 and "success of step_000002 in 2 episodes" in named.out, named.err
    assert (tmp_path / "elsewhere" / "evaluation" / "step_000002.json").exists()
    start = rlinf_vla("eval", "run=run", "checkpoint=null", "run_dir=start")
    assert start.code == 0 and "success of start" in start.out, start.err


def test_another_recipe_does_not_overwrite_an_evaluation_of_the_run(
    train: Train, rlinf_vla: CommandLine
) -> None:
    run = train("run", *OVERRIDES)
    assert rlinf_vla("eval", "run=run").code == 0
    own = (run / "evaluation" / "step_000004.json").read_bytes()
    found = rlinf_vla("eval", "run=run", "rollout.temperature=0.5", "episodes=2")
    assert (
        found.code == 0 and "not among the run's own evaluations: episodes was 6 in " in found.out
    ), found.err
    (written,) = Path("runs/counting_ppo").glob("*/evaluation/step_000004.json")
    assert (
        f"episodes, seeds and machine: {written}" in found.out
        and (run / "evaluation" / "step_000004.json").read_bytes() == own
    )
    refused = rlinf_vla("eval", "run=run", "episodes=2", "run_dir=run")
    assert "episodes was 6 in run and is 2 now" in refused.complaint


def test_a_checkpoint_may_be_named_by_its_run(
    train: Train, rlinf_vla: CommandLine, counting: Counting
) -> None:
    train("run", *QUICK)
    found = rlinf_vla(*counting.arguments("eval", "counting_ppo", "checkpoint=run"))
    assert found.code == 0 and "success of step_000002" in found.out, found.err


def test_an_export_needs_no_repeated_overrides(
    train: Train, rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    train("run", *OVERRIDES)
    typed = counting.arguments(
        "export",
        "counting_ppo",
        *OVERRIDES,
        "checkpoint=run/checkpoints/step_000004",
        "output=typed",
    )
    assert rlinf_vla(*typed).code == 0
    found = rlinf_vla("export", "run=run", "output=short")
    assert found.code == 0 and "iteration 4 of counting_ppo" in found.out, found.err
    first, second = (
        {
            path.name: path.read_bytes()
            for path in (tmp_path / name).iterdir()
            if path.name != "manifest.json"
        }
        for name in ("typed", "short")
    )
    assert first == second and first
    assert "run=RUN output=DIR" in rlinf_vla("export", "run=run").complaint


def test_a_sweep_evaluates_the_run_and_resumes_with_its_saved_recipe(
    train: Train, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    train("run", *QUICK)
    few = ("run_dir=sweep", "episodes=3", "evaluation.modes=[greedy]")
    found = rlinf_vla("eval", "run=run", "sweep.policies=[start,expert]", *few)
    assert found.code == 0, found.err
    document = json.loads((tmp_path / "sweep" / "result.json").read_text())
    assert list(document["policies"]) == ["step_000002", "start", "expert"]
    again = rlinf_vla("eval", "run=sweep")
    assert again.code == 0 and "found 18 of 18 episodes in sweep" in again.out, (
        again.out + again.err
    )
    assert "holds an evaluation sweep" in rlinf_vla("train", "run=sweep").complaint
    listed = rlinf_vla(
        "eval",
        "run=run",
        f"sweep.policies=[expert,{tmp_path}/run/checkpoints/../checkpoints/step_000002]",
        "run_dir=listed",
    )
    assert (
        listed.code == 0
        and len(json.loads((tmp_path / "listed" / "result.json").read_text())["policies"]) == 3
    ), "not twice"


def test_other_verbs_take_the_recipe_too(
    train: Train, rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    run = train("run", *QUICK, "env.num_envs=8")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = rlinf_vla("bench", "rollout", "run=run")
    assert found.code == 0, found.out + found.err
    (written,) = Path("runs/counting_ppo").glob("*/bench_rollout.json")
    assert json.loads(written.read_text())["serial"]["steps"] > 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


# the contents of a run's recipe, and overrides on top of it


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name.startswith("repro_") else ())
        for name in list_command.recipe_names()
    ],
)
def test_every_recipe_is_saved_completely(name: str, tmp_path: Path) -> None:
    before = compose.load(
        "train",
        [f"recipe={name}", "cluster=laptop", "seed=3", f"run_dir={tmp_path}", "resume=auto"],
    )
    run_directory.save_recipe(tmp_path / "recipe.yaml", before)
    after = compose.load("train", [f"run={tmp_path}"])
    assert OmegaConf.to_container(after, resolve=True) == OmegaConf.to_container(
        before, resolve=True
    )
    assert recipes.read(after) == recipes.read(before)


def test_a_run_is_shown_without_running(train: Train, rlinf_vla: CommandLine) -> None:
    train("run", *OVERRIDES)
    found = rlinf_vla("eval", "run=run", "episodes=3", "--cfg", "job")
    shown = OmegaConf.create(found.out)
    assert (found.code, shown.episodes, shown.seed, shown.model.lora.rank) == (0, 3, 7, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["recipe=counting_ppo"], "run=run and recipe=counting_ppo"),
        (["model=linear"], "run=run and model=linear"),
        (["preset=rl4vla"], "run=run and preset=rl4vla"),
        (["run=other"], "run=run and run=other"),
        (["algorithm.gama=0.5"], "algorithm.gama is not a key; did you mean algorithm.gamma?"),
        (["algorithm.group_size=4"], "algorithm.group_size is not a key of the recipe of run=run"),
        (["+algorithm.brand_new=1"], "algorithm.brand_new is not a key"),
        (["algorithm.gamma=high"], "algorithm.gamma=high"),
        (["env.num_envs=3"], "env.num_envs=3"),
        (["cluster=lptop"], "cluster=lptop does not exist; did you mean cluster=laptop?"),
        (
            ["checkpoint=run/checkpoints/step_000009"],
            "checkpoint=run/checkpoints/step_000009: no such directory",
        ),
    ],
)
def test_overrides_on_top_are_checked(
    kept: Path, rlinf_vla: CommandLine, overrides: list[str], words: str
) -> None:
    assert words in rlinf_vla("eval", "run=run", *overrides).complaint


def test_keys_of_the_command_line_must_be_repeated(kept: Path) -> None:
    """The run may come from another user."""
    path = kept / "recipe.yaml"
    path.write_text(path.read_text().replace("address: null", "address: theirs:10001"))
    for verb in ("train", "eval"):
        with pytest.raises(
            UserError,
            match=r"recipe\.yaml sets cluster\.address=theirs:10001, .* give cluster\.address=",
        ):
            compose.load(verb, [f"run={kept}"])
        assert compose.load(verb, [f"run={kept}", "cluster.address=null"]).cluster.address is None
        assert compose.load(verb, [f"run={kept}", "cluster=laptop"]).cluster.address is None


def test_no_output_path_comes_from_the_run(kept: Path) -> None:
    path = kept / "recipe.yaml"
    whole = path.read_text()
    path.write_text(whole.replace("output: null", "output: /tmp/theirs"))
    assert compose.load("export", [f"run={kept}"]).output is None
    path.write_text(whole.replace("name: counting_ppo", "name: /tmp/theirs", 1))
    with pytest.raises(UserError, match=r"name=/tmp/theirs cannot be used: use letters"):
        recipes.read(compose.load("eval", [f"run={kept}"]))
    path.write_text(whole.replace("name: counting_ppo", "name: ???", 1))
    with pytest.raises(UserError, match=r"recipe\.yaml holds no recipe .*name has no value"):
        compose.load("eval", [f"run={kept}"])


def test_a_dictionary_of_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    before = compose.load("train", ["recipe=maniskill_ppo", "cluster=laptop"])
    theirs = {"name": "gymnasium", "id": "Pendulum-v1", "kwargs": {"theirs": 1, "g": 9.8}}
    values = OmegaConf.to_container(before, resolve=True) | {"env": theirs}
    (tmp_path / "recipe.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
    with pytest.raises(UserError, match=r"give \+env\.kwargs="):
        compose.load("train", [f"run={tmp_path}"])
    assert compose.load("train", [f"run={tmp_path}", "+env.kwargs={g: 1}"]).env.kwargs == {"g": 1}


def test_the_cluster_is_that_of_the_run_unless_overridden(
    kept: Path, rlinf_vla: CommandLine
) -> None:
    def cluster(*overrides: str) -> Any:
        return OmegaConf.create(
            rlinf_vla("train", "run=run", *overrides, "--cfg", "job").out
        ).cluster

    assert (
        cluster().micro_batch_size == 7
        and cluster("cluster.micro_batch_size=9").micro_batch_size == 9
    )
    assert (
        cluster("cluster=1gpu").device == "cuda" and cluster("cluster=auto").micro_batch_size != 7
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda kept: kept.update(colour="red"), ["run/recipe.yaml", "colour"]),
        (
            lambda kept: kept["algorithm"].update(old_key=1),
            ["run/recipe.yaml", "algorithm.old_key"],
        ),
        (
            lambda kept: kept["model"]["options"].update(old_key=1),
            ["run/recipe.yaml", "model.options.old_key"],
        ),
        (lambda kept: kept["env"].update(num_envs="many"), ["run/recipe.yaml", "env.num_envs"]),
        (lambda kept: kept["env"].update(name="abacus"), ["env=abacus is not known"]),
        (lambda kept: kept["model"].update(name="os.system"), ["model=os.system is not known"]),
        (
            lambda kept: kept.update(defaults=[{"override model": "openvla"}]),
            ["run/recipe.yaml", "defaults"],
        ),
        (
            lambda kept: kept.update(hydra={"run": {"dir": "${oc.env:HOME}"}}),
            ["run/recipe.yaml", "an interpolation"],
        ),
        (lambda kept: kept.pop("env"), ["run/recipe.yaml", "env"]),
        (lambda kept: kept.update(model="linear"), ["run/recipe.yaml"]),
        (lambda kept: kept["env"].update(num_envs=3), ["env.num_envs=3"]),
    ],
)
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_a_recipe_of_another_version_or_another_user(
    kept: Path,
    rlinf_vla: CommandLine,
    verb: str,
    change: Callable[[dict[str, Any]], object],
    words: list[str],
) -> None:
    values = OmegaConf.to_container(OmegaConf.load(kept / "recipe.yaml"))
    assert isinstance(values, dict)
    change(values)  # type: ignore[arg-type]
    (kept / "recipe.yaml").write_text(json.dumps(values))
    complaint = rlinf_vla(verb, "run=run").complaint
    assert all(word in complaint for word in words), complaint


@pytest.mark.parametrize("verb", ["train", "eval", "export"])
def test_a_folder_without_a_run(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert "run=nowhere: no such directory" in rlinf_vla(verb, "run=nowhere").complaint
    assert (
        "empty is not a run directory: recipe.yaml is missing"
        in rlinf_vla(verb, "run=empty").complaint
    )
    assert "File name too long" in rlinf_vla(verb, f"run={'x' * 300}").complaint
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_run_without_a_checkpoint_cannot_be_evaluated(kept: Path, rlinf_vla: CommandLine) -> None:
    for arguments in (["eval"], ["export", "output=out"]):
        assert "no complete checkpoint there" in rlinf_vla(*arguments, "run=run").complaint
