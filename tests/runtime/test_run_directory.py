from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.run_directory import (
    checkpoint_at,
    for_evaluation,
    locked,
    opened_for_recording,
    resolve_run,
    saved_recipe,
)
from tests.training.processes import during

NAME = "sorting"

EMPTY = hashlib.sha256().hexdigest()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**changes: object) -> DictConfig:
    recipe = {
        "name": NAME,
        "seed": 0,
        "iterations": 10,
        "run_dir": None,
        "resume": "never",
        "env": {"num_envs": 4, "processes": 2},
        "algorithm": {"gamma": 0.9, "learning_rate": 0.1, "target_kl": None},
        "rollout": {"pipeline_depth": 2, "temperature": 1.0},
        "cluster": {"name": "laptop"},
        "checkpoints": {"every": 5},
        "evaluation": {"every": 0},
        "episodes": 20,
    }
    result = OmegaConf.create(recipe)
    for key, value in changes.items():
        OmegaConf.update(result, key.replace("__", "."), value)
    return result


TIMES = itertools.count(1)


def begin(directory: Path, *steps: int, **changes: object) -> Path:
    """A run that has written checkpoints after ``steps``, a second later than the one before."""
    with locked(directory, config(run_dir=str(directory), **changes), None):
        for step in steps:
            checkpoint = directory / "checkpoints" / f"step_{step:06d}"
            checkpoint.mkdir(parents=True)
            for name in ("heads.safetensors", "state.json"):
                (checkpoint / name).touch()
            (checkpoint / "COMPLETE").write_text(
                json.dumps(dict.fromkeys(("heads.safetensors", "state.json"), EMPTY))
            )
    now = next(TIMES)
    for path in (directory / "recipe.yaml", *directory.glob("checkpoints/*/COMPLETE")):
        os.utime(path, (now, now))
    return directory


def resume(**changes: object) -> tuple[Path, Path | None]:
    """Choose and open, as a verb does."""
    recipe = config(**changes)
    directory, checkpoint = resolve_run(recipe)
    with locked(directory, recipe, checkpoint):
        pass
    return directory, checkpoint


def test_every_start_has_a_separate_directory() -> None:
    starts = [resolve_run(config()) for _ in range(3)]
    assert len({directory for directory, _ in starts}) == 3
    for directory, checkpoint in starts:
        assert directory.parent == Path("runs", NAME) and directory.is_dir() and checkpoint is None


def test_the_recipe_is_saved(here: Path) -> None:
    recipe = config(run_dir=str(here / "run"))
    with locked(here / "run", recipe, None):
        assert OmegaConf.load(here / "run" / "recipe.yaml") == recipe


def test_a_used_directory_is_not_overwritten(here: Path) -> None:
    begin(here / "run")
    before = (here / "run" / "recipe.yaml").read_text()
    with pytest.raises(UserError, match="resume=auto"):
        resolve_run(config(run_dir=str(here / "run")))
    assert (here / "run" / "recipe.yaml").read_text() == before


def test_two_runs_never_share_a_directory(here: Path) -> None:
    recipe = config(run_dir=str(here / "run"))

    def hold(wait: Callable[[], None]) -> None:
        with locked(here / "run", recipe, None):
            wait()

    with (
        during(hold),
        pytest.raises(UserError, match="in use by another run"),
        locked(here / "run", recipe, None),
    ):
        pytest.fail("both are in")
    with (
        locked(here / "run", recipe, None),
        pytest.raises(UserError, match="in use"),
        locked(here / "run", recipe, None),
    ):
        pytest.fail("both are in")
    with locked(here / "run", recipe, None):
        pass


def test_a_failed_run_releases_its_lock(here: Path) -> None:
    recipe = config(run_dir=str(here / "run"))
    with pytest.raises(ZeroDivisionError), locked(here / "run", recipe, None):
        raise ZeroDivisionError
    with locked(here / "run", recipe, None):
        pass


def test_a_read_only_directory_is_a_users_mistake(here: Path) -> None:
    (here / "file").write_text("")
    for directory in (here / "file", here / "file" / "run", Path("/proc/run")):
        with (
            pytest.raises(UserError, match=f"run_dir={directory} cannot be written"),
            locked(directory, config(), None),
        ):
            pytest.fail("it is open")


def test_an_evaluation_checks_its_directory_before_it_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = begin(here / "run", 5) / "checkpoints" / "step_000005"
    assert for_evaluation(config(), checkpoint) == here / "run"
    assert for_evaluation(config(run_dir="new"), checkpoint) == Path("new")
    (here / "file").write_text("")
    with pytest.raises(UserError, match="run_dir=file cannot be written"):
        for_evaluation(config(run_dir="file"), checkpoint)
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # another user's run; root may write everywhere
    with pytest.raises(UserError, match="run cannot be written: choose another run_dir"):
        for_evaluation(config(), checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"episodes": 5}, "episodes was 20 in {run} and is 5 now"),
        ({"rollout__temperature": 0.5}, "rollout.temperature was 1.0 in {run} and is 0.5 now"),
        (
            {"evaluation__probes": ["blank_image"]},
            'evaluation.probes was absent in {run} and is ["blank_image"] now',
        ),
    ],
)
def test_a_run_holds_only_evaluations_by_its_own_recipe(
    here: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], words: str
) -> None:
    """Reports, `push` and a resumed training take what is there for results of the run."""
    checkpoint = begin(here / "run", 5) / "checkpoints" / "step_000005"
    fresh = for_evaluation(config(**changes), checkpoint)
    assert fresh.parent == Path("runs", NAME) and fresh.is_dir()
    told = words.format(run=here / "run")
    assert capsys.readouterr().out == f"not among the run's own evaluations: {told}\n"
    with pytest.raises(UserError, match="does not belong to that run, choose another run_dir"):
        for_evaluation(config(run_dir="run", **changes), checkpoint)
    assert for_evaluation(config(run_dir="run"), checkpoint) == Path("run")


@pytest.mark.parametrize(
    "changes",
    [
        {
            "checkpoint": "run/checkpoints/step_000005",
            "iterations": 3,
            "cluster__name": "1gpu",
            "checkpoints__every": 1,
        },
        {
            "env__num_envs": 8,
            "env__processes": 1,
            "rollout__pipeline_depth": 1,
            "evaluation__every": 5,
            "evaluation__filmed": 3,
        },
    ],
)
def test_what_changes_no_result_stays_with_the_run(here: Path, changes: dict[str, object]) -> None:
    checkpoint = begin(here / "run", 5) / "checkpoints" / "step_000005"
    assert for_evaluation(config(**changes), checkpoint) == here / "run"


# resume


def test_auto_takes_the_newest_checkpoint_of_run_dir(here: Path) -> None:
    begin(here / "run", 5, 10)
    (here / "run" / "checkpoints" / "step_000015").mkdir()  # without COMPLETE
    assert resume(run_dir=str(here / "run"), resume="auto") == (
        here / "run",
        here / "run/checkpoints/step_000010",
    )


def test_auto_takes_the_newest_run_of_the_recipe() -> None:
    begin(Path("runs", NAME, "20260101-000000"), 50)
    newest = begin(Path("runs", NAME, "20260102-000000"), 5)
    begin(Path("runs", "another", "20270101-000000"), 7)
    assert resume(resume="auto", run_dir=None)[1] == newest / "checkpoints/step_000005"


def test_auto_skips_a_newer_run_without_a_checkpoint_with_a_message() -> None:
    finished = begin(Path("runs", NAME, "20260101-000000"), 50)
    failed = begin(Path("runs", NAME, "20260102-000000"))
    (failed / "checkpoints" / "step_000005").mkdir(parents=True)  # without COMPLETE
    said: list[str] = []
    assert resolve_run(config(resume="auto"), said.append) == (
        finished,
        finished / "checkpoints/step_000050",
    )
    assert len(said) == 1 and str(failed) in said[0] and str(finished) in said[0]


def test_auto_takes_the_latest_checkpoint_for_any_name_of_its_run() -> None:
    named = begin(Path("runs", NAME, "half"), 50)
    newest = begin(Path("runs", NAME, "20260101-000000"), 5)
    said: list[str] = []
    assert (
        resolve_run(config(resume="auto"), said.append)
        == (newest, newest / "checkpoints/step_000005")
        and not said
    )
    begin(named, 55)
    assert resolve_run(config(resume="auto"))[0] == named


def test_auto_starts_from_the_beginning_with_a_message(here: Path) -> None:
    said: list[str] = []
    assert resolve_run(config(resume="auto", run_dir=str(here / "new")), said.append) == (
        here / "new",
        None,
    )
    directory, checkpoint = resolve_run(config(resume="auto"), said.append)
    assert directory.parent == Path("runs", NAME) and checkpoint is None
    assert len(said) == 2 and all("no complete checkpoint" in each for each in said)
    assert str(here / "new") in said[0] and str(directory) in said[1]
    resolve_run(config(), said.append)
    resolve_run(config(resume="auto", run_dir=str(begin(here / "run", 5))), said.append)
    assert len(said) == 2, "no message if a checkpoint is found or none was searched for"


def test_a_run_directory_may_be_a_symbolic_link(here: Path) -> None:
    begin(here / "run", 5)
    (here / "link").symlink_to("run")
    assert resume(run_dir="link", resume="auto")[1] == Path("link/checkpoints/step_000005")
    assert resume(run_dir="run", resume="link")[1] == here / "link/checkpoints/step_000005"
    with pytest.raises(UserError, match="holds a run already"):
        resolve_run(config(run_dir="link"))


def test_resume_never_refuses_a_directory_with_a_checkpoint(here: Path) -> None:
    """Even if the directory has lost its recipe."""
    (begin(here / "run", 5) / "recipe.yaml").unlink()
    with pytest.raises(UserError, match="holds a run already"):
        resolve_run(config(run_dir=str(here / "run")))


@pytest.mark.parametrize(
    ("form", "step"),
    [
        ("{run}", 10),
        ("{run}/", 10),
        ("{run}/checkpoints/step_000005", 5),
        ("{run}/checkpoints/step_000005/", 5),
        ("run", 10),
        ("./run/../run", 10),
        ("run/checkpoints/step_000005", 5),
    ],
)
def test_a_path_may_name_a_run_or_a_checkpoint(here: Path, form: str, step: int) -> None:
    begin(here / "run", 5, 10)
    directory, checkpoint = resume(resume=form.format(run=here / "run"))
    assert checkpoint is not None
    assert (
        directory.resolve() == here / "run"
        and checkpoint.resolve() == here / "run" / "checkpoints" / f"step_{step:06d}"
    )


@pytest.mark.parametrize(
    ("where", "form"),
    [("run", "."), ("run", "checkpoints/step_000005"), ("run/checkpoints", "step_000005")],
)
def test_a_path_may_be_relative(
    here: Path, monkeypatch: pytest.MonkeyPatch, where: str, form: str
) -> None:
    begin(here / "run", 5)
    monkeypatch.chdir(where)
    directory, checkpoint = resume(resume=form)
    assert checkpoint is not None
    assert (
        directory.resolve() == here / "run"
        and checkpoint.resolve() == here / "run" / "checkpoints" / "step_000005"
    )


@pytest.mark.parametrize("form", ["nowhere", "empty", "run/checkpoints/step_000099"])
def test_a_path_without_a_checkpoint_is_refused(here: Path, form: str) -> None:
    begin(here / "run", 5)
    begin(here / "empty")
    with pytest.raises(UserError, match=f"resume={form}"):
        resolve_run(config(resume=form))


def test_a_path_and_another_run_dir_contradict(here: Path) -> None:
    begin(here / "run", 5)
    with pytest.raises(UserError, match="remove run_dir"):
        resolve_run(config(resume="run", run_dir=str(here / "other")))
    assert resume(resume="run", run_dir="run")[1] is not None


def test_a_checkpoint_that_was_copied_from_its_run_has_no_run(here: Path) -> None:
    (begin(here / "run", 5) / "checkpoints" / "step_000005").rename(here / "best")
    assert checkpoint_at("best", "checkpoint") == Path("best")
    with pytest.raises(UserError, match="resume=best is a checkpoint outside a run directory"):
        resolve_run(config(resume="best"))


# saved recipes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1",
        "word",
        "a: [",
        "a: 1\na: 2",
        "a: &a [*a]",
        "a: ${b}",
        "a: {b: [[{c: '${oc.env:HOME}'}]]}",
        "a: ${",
        "a: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [touched]]",
        "\0",
    ],
)
def test_an_invalid_recipe_is_one_line_and_is_not_executed(here: Path, text: str) -> None:
    """The directory may come from another user."""
    begin(here / "run", 5)
    (here / "run" / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=r"recipe\.yaml") as refusal:
        resume(run_dir="run", resume="auto")
    assert "\n" not in str(refusal.value) and not (here / "touched").exists()


def test_a_recipe_that_is_no_text_is_one_line(here: Path) -> None:
    begin(here / "run", 5)
    (here / "run" / "recipe.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"recipe\.yaml cannot be read"):
        saved_recipe(here / "run")
    with pytest.raises(UserError, match="nowhere is not a run directory"):
        saved_recipe(Path("nowhere"))


# permitted changes of a continued run


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.gamma", 0.8),
        ("algorithm.target_kl", 0.1),
        ("seed", 1),
        ("env.num_envs", 8),
        ("rollout.temperature", 0.5),
        ("name", "other"),
        ("algorithm.brand_new", 1),
    ],
)
def test_a_continued_run_has_the_same_recipe(here: Path, key: str, value: object) -> None:
    begin(here / "run", 5)
    recipe = config(run_dir=str(here / "run"), resume="auto")
    OmegaConf.update(recipe, key, value, force_add=True)
    directory, checkpoint = resolve_run(recipe)
    before = (here / "run" / "recipe.yaml").read_text()
    with (
        pytest.raises(UserError, match=f"resume: {key} was .* in .* and is .* now"),
        locked(directory, recipe, checkpoint),
    ):
        pytest.fail("it goes on")
    assert (here / "run" / "recipe.yaml").read_text() == before


def test_a_key_of_another_version_cannot_be_restored(here: Path) -> None:
    begin(here / "run", 5)
    recipe = config(run_dir=str(here / "run"), resume="auto")
    OmegaConf.update(recipe, "algorithm.brand_new", 1, force_add=True)
    directory, checkpoint = resolve_run(recipe)
    with (
        pytest.raises(UserError, match=r"was absent .* continue it with the version"),
        locked(directory, recipe, checkpoint),
    ):
        pytest.fail("it goes on")
    recipe.seed = 1  # which the user can restore, so it is named first
    with (
        pytest.raises(UserError, match=r"seed was 0 .* restore its value"),
        locked(directory, recipe, checkpoint),
    ):
        pytest.fail("it goes on")


@pytest.mark.parametrize("made", ["evaluation/before.json", "episodes/.under_way"])
def test_so_has_one_that_died_before_its_first_checkpoint(here: Path, made: str) -> None:
    begin(here / "run")
    assert resume(run_dir="run", resume="auto", seed=1), "the recipe has not been used yet"
    path = here / "run" / made
    path.parent.mkdir()
    path.write_text("")
    assert resume(run_dir="run", resume="auto", seed=1)
    with pytest.raises(UserError, match="resume: seed was 1 in run and is 2 now"):
        resume(run_dir="run", resume="auto", seed=2)


def test_a_sweep_cannot_be_continued_as_a_run(here: Path) -> None:
    run = begin(Path("runs", NAME, "20260101-000000"), 5)
    for stamp, mark in (("20260102-000000", "blocks"), ("20260103-000000", "result.json")):
        begin(Path("runs", NAME, stamp))
        Path("runs", NAME, stamp, mark).mkdir()
        with pytest.raises(UserError, match="holds an evaluation sweep"):
            resolve_run(config(resume="auto", run_dir=f"runs/{NAME}/{stamp}"))
    assert resume(resume="auto", run_dir=None)[0] == run


def test_episodes_of_another_recipe_are_refused_in_a_recording(here: Path) -> None:
    with opened_for_recording(here / "parts", config()):
        pass
    with opened_for_recording(here / "parts", config(seed=1)):
        (here / "parts" / "demonstration_000000.safetensors").write_text("")
    with opened_for_recording(here / "parts", config(seed=1, algorithm__gamma=0.8)):
        pass
    with (
        pytest.raises(UserError, match="parts holds other episodes: seed was 1"),
        opened_for_recording(here / "parts", config()),
    ):
        pytest.fail("they would be mixed")


@pytest.mark.parametrize(
    "changes",
    [
        {"iterations": 99},
        {"episodes": 1},
        {"cluster__name": "1gpu"},
        {"evaluation__every": 3},
        {"checkpoints__every": 1},
        {"rollout__pipeline_depth": 1},
        {"env__processes": 1},
    ],
)
def test_length_and_plan_may_change(here: Path, changes: dict[str, object]) -> None:
    begin(here / "run", 5)
    assert resume(run_dir=str(here / "run"), resume="auto", **changes)[1] is not None
    key, value = next(iter(changes.items()))
    assert (
        OmegaConf.select(OmegaConf.load(here / "run" / "recipe.yaml"), key.replace("__", "."))
        == value
    )
