"""A sweep from its command line to its files, on counter world."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.core import plugins
from rlinf_vla.features.sweeps.block_player import BlockPlayer
from rlinf_vla.features.sweeps.results import COLUMNS
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training import lora
from tests.cli.conftest import CommandLine, Counting
from tests.cli.counting_plugins import CountingInSuites, announce

ROOT = Path(__file__).parents[2]
SCRIPTED = ("sweep.policies=[expert,random]", "episodes=7", "sweep.block=3", "evaluation.filmed=0")

Eval = Callable[..., Path]


@pytest.fixture
def suites(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> Counting:
    plugin = CountingInSuites()
    monkeypatch.setattr(plugins, "envs", lambda: {"counter": plugin})
    return Counting(counting.folder, plugin)


@pytest.fixture
def sweep(rlinf_vla: CommandLine, suites: Counting, tmp_path: Path) -> Eval:
    """Sweeps into a run directory of that name."""

    def run(name: str, *overrides: str) -> Path:
        found = rlinf_vla(*suites.arguments("eval", "counting_ppo", f"run_dir={name}", *overrides))
        assert found.code == 0, found.out + found.err
        assert all(env.closed for env in suites.plugin.created)
        return tmp_path / name

    return run


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


def told(directory: Path) -> dict[str, Any]:
    """The part of a result that is equal in each repetition of a sweep."""
    return {
        name: result(directory)[name]
        for name in ("policies", "differences", "episodes", "suites", "provenance")
    }


def test_a_sweep_writes_all_files_into_its_directory(sweep: Eval) -> None:
    directory = sweep("out", *SCRIPTED, "evaluation.filmed=1")
    document = result(directory)
    places = [
        (each["policy"], each["suite"], each["task"], each["seed"]) for each in document["episodes"]
    ]
    assert len(set(places)) == len(places) == 2 * 2 * 2 * 7
    expert, chance = document["policies"]["expert"], document["policies"]["random"]
    assert (expert["n_episodes"], expert["pc_success"]) == (
        28,
        pytest.approx(100 * expert["n_success"] / 28),
    )
    assert list(expert["per_suite"]) == ["within 6", "within 3"] and list(
        expert["per_suite"]["within 6"]["per_task"]
    ) == ["Low", "High"]
    assert (
        expert["per_suite"]["within 6"]["n_success"]
        == 14
        > chance["per_suite"]["within 6"]["n_success"]
    )
    assert [(each["before"], each["after"], each["suite"]) for each in document["differences"]] == [
        ("expert", "random", None),
        ("expert", "random", "within 6"),
        ("expert", "random", "within 3"),
    ]
    assert [suite["episode_limit"] for suite in document["suites"]] == [6, 3] and document[
        "suites"
    ][0]["control_hz"] == 10.0
    assert document["environment"]["packages"]["torch"] and document["recipe"]["sweep"][
        "policies"
    ] == ["expert", "random"]
    with (directory / "episodes.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == list(COLUMNS) and len(lines) == len(places)
    assert [
        (line["policy"], line["suite"], line["task"], int(line["seed"])) for line in lines
    ] == places
    assert [bool(int(line["success"])) for line in lines] == [
        each["success"] for each in document["episodes"]
    ]
    page = (directory / "report.html").read_text()
    assert (
        "within 3" in page
        and page.count("<video") == len(list((directory / "videos").glob("*.mp4"))) == 8
    )
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page, (
        "self-contained"
    )


def test_videos_show_failures_first(sweep: Eval) -> None:
    directory = sweep("out", "sweep.policies=[random]", "episodes=12", "evaluation.filmed=2")
    document = result(directory)
    for part, suite in enumerate(("within 6", "within 3")):
        for task, name in enumerate(("Low", "High")):
            played = [
                each
                for each in document["episodes"]
                if (each["suite"], each["task"]) == (suite, name)
            ]
            failed = [each["seed"] for each in played if not each["success"]]
            won = [each["seed"] for each in played if each["success"]]
            filmed = sorted(
                int(path.stem.split("_")[3])
                for path in (directory / "videos").glob(f"00_{part:03d}_{task:03d}_*.mp4")
            )
            assert filmed == sorted((failed + won)[:2])
    captions = re.findall(r"<b>random.</b> (\w+), seed \d", (directory / "report.html").read_text())
    assert captions == ["Low", "High"] * 4, "one of each suite and task before any second one"


def test_probes_are_columns_beside_their_policy(sweep: Eval, rlinf_vla: CommandLine) -> None:
    """The same episodes for each; the linear policy reads images and no instruction."""
    probes = "evaluation.probes=[blank_instruction,blank_image]"
    directory = sweep(
        "out",
        "sweep.policies=[start,random]",
        "episodes=9",
        "sweep.block=4",
        "evaluation.modes=[sampled]",
        probes,
    )
    document = result(directory)
    assert list(document["policies"]) == [
        "start",
        "start with blank_instruction",
        "start with blank_image",
        "random",
    ]
    assert list(document["provenance"]) == ["start", "random"]
    whole = {
        (each["before"], each["after"]): each
        for each in document["differences"]
        if each["suite"] is None
    }
    assert list(whole) == [
        ("start", "start with blank_instruction"),
        ("start", "start with blank_image"),
        ("start", "random"),
    ]
    blank = whole["start", "start with blank_instruction"]
    assert (
        blank["n_pairs"] == 36
        and blank["n_gained"] == blank["n_lost"] == 0
        and blank["pc_difference"] == 0
    )
    steps = {
        probe: [each["steps"] for each in document["episodes"] if each["probe"] == probe]
        for probe in ("none", "blank_image")
    }
    assert steps["blank_image"] != steps["none"][: len(steps["blank_image"])], "it reads images"
    given = {
        (each["policy"], each["probe"], each["instruction"])
        for each in document["episodes"]
        if each["task"] == "Low"
    }
    assert ("start", "blank_instruction", "") in given and (
        "start",
        "none",
        "push the cube",
    ) in given
    page = (directory / "report.html").read_text()
    assert "start with blank_image" in page and "2 policies on" in page
    found = verify(rlinf_vla, directory, "--episodes", "40")
    assert found.code == 0 and "40 of 40 episodes are bit-identical" in found.out, (
        found.out + found.err
    )


STOPPING = (
    "sweep.policies=[random,expert]",
    "episodes=40",
    "sweep.block=4",
    "evaluation.filmed=0",
    "sweep.stop_when_decided=true",
)


def test_a_sweep_stops_when_it_is_decided(
    sweep: Eval, rlinf_vla: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each suite by itself, after the same seeds of both policies and all tasks. It resumes and is verified like any other."""
    document = result(directory := sweep("out", *STOPPING))
    whole = result(sweep("whole", *STOPPING[:-1]))
    for suite in ("within 6", "within 3"):
        episodes = [each for each in document["episodes"] if each["suite"] == suite]
        seeds = sorted({each["seed"] for each in episodes})
        assert seeds == list(range(len(seeds))) and len(episodes) == 2 * 2 * len(seeds)
        everything = [each for each in whole["episodes"] if each["suite"] == suite]
        assert all(each in everything for each in episodes), "those of the sweep that does not stop"
        (known,) = [each["anytime"] for each in whole["differences"] if each["suite"] == suite]
        after = 40 if known["decided_after"] is None else -(-known["decided_after"] // 4) * 4
        assert len(seeds) == after
    assert len(document["episodes"]) < len(whole["episodes"])
    assert (document["policies"]["expert"]["per_suite"]["within 6"]["pc_success"]) == 100
    found = verify(rlinf_vla, directory, "--episodes", "12")
    assert found.code == 0, found.out + found.err
    first = told(directory)
    (directory / "result.json").unlink()
    next(iter((directory / "blocks").glob("*.json"))).unlink()
    assert told(sweep("out", *STOPPING)) == first
    last = document["episodes"][-1]["seed"]
    cut = change(
        directory,
        lambda document: document.update(
            episodes=[e for e in document["episodes"] if e["seed"] != last]
        ),
    )
    assert "does not hold the episodes" in verify(rlinf_vla, cut).complaint


def test_random_actions_and_expert_depend_only_on_the_episode(sweep: Eval) -> None:
    """However episodes are grouped; random actions also depend on the seed of the recipe."""
    first = told(sweep("first", *SCRIPTED))
    assert (
        told(
            sweep("other", *SCRIPTED, "sweep.block=5", "env.num_envs=2", "rollout.pipeline_depth=1")
        )
        == first
    )
    elsewhere = told(sweep("seed", *SCRIPTED, "seed=1"))["episodes"]
    assert [each for each in elsewhere if each["policy"] == "expert"] == [
        each for each in first["episodes"] if each["policy"] == "expert"
    ]
    assert elsewhere != first["episodes"]


def test_policies_of_every_kind_in_every_mode(
    sweep: Eval, rlinf_vla: CommandLine, suites: Counting, tmp_path: Path
) -> None:
    trained = rlinf_vla(
        *suites.arguments(
            "train", "counting_ppo", "run_dir=run", "evaluation.before_and_after=false"
        )
    )
    assert trained.code == 0, trained.err
    LinearPolicy(LinearOptions(chunk=2, seed=5)).save(tmp_path / "another")
    runs = [f"run/checkpoints/step_00000{number}" for number in (1, 2)]
    directory = sweep(
        "out",
        f"sweep.policies=[start,{runs[0]},another,{runs[1]}]",
        "episodes=12",
        "evaluation.filmed=0",
    )
    document = result(directory)
    names = ["start", "step_000001", "another", "step_000002"]
    assert list(document["policies"]) == [
        f"{name} {mode}" for name in names for mode in ("sampled", "greedy")
    ]
    assert len({policy["sha256"] for policy in document["provenance"].values()}) == 4
    assert (
        document["provenance"]["step_000001 greedy"]["model_sha256"]
        == document["provenance"]["start greedy"]["sha256"]
    )
    alone = result(
        sweep("alone", f"sweep.policies=[{runs[1]}]", "episodes=12", "evaluation.filmed=0")
    )
    with_others = [
        each | {"policy": ""}
        for each in document["episodes"]
        if each["policy"].startswith("step_000002")
    ]
    assert [each | {"policy": ""} for each in alone["episodes"]] == with_others, (
        "no state of one policy affects the next"
    )
    newest = result(sweep("newest", "sweep.policies=[run]", "episodes=12", "evaluation.filmed=0"))
    assert newest["provenance"] == alone["provenance"], "a run is its newest checkpoint"
    assert newest["episodes"] == alone["episodes"] and newest["recipe"]["sweep"]["policies"] == [
        runs[1]
    ]


def test_a_sweep_keeps_the_checkpoint_that_it_began_with(
    sweep: Eval, rlinf_vla: CommandLine, suites: Counting, tmp_path: Path
) -> None:
    """The run goes on training meanwhile."""
    trained = rlinf_vla(
        *suites.arguments(
            "train", "counting_ppo", "run_dir=run", "evaluation.before_and_after=false"
        )
    )
    assert trained.code == 0, trained.err
    given = ("episodes=2", "evaluation.filmed=0")
    directory = sweep("out", "sweep.policies=[run]", *given)
    written = tmp_path / "run" / "checkpoints"
    shutil.copytree(written / "step_000001", written / "step_000003")
    assert verify(rlinf_vla, directory).code == 0
    arguments = suites.arguments("eval", "counting_ppo", "run_dir=out", *given)
    again = rlinf_vla(*arguments, "sweep.policies=[run]")
    assert "step_000002" in again.complaint and "step_000003" in again.complaint
    assert (
        "found 16 of 16"
        in rlinf_vla(*arguments, "sweep.policies=[run/checkpoints/step_000002]").out
    )


def test_a_policy_acts_in_a_sweep_as_in_a_single_evaluation(
    sweep: Eval, rlinf_vla: CommandLine, suites: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with rounded weights: here to integers, which removes all that was learnt."""
    trained = rlinf_vla(
        *suites.arguments(
            "train", "counting_ppo", "run_dir=run", "evaluation.before_and_after=false"
        )
    )
    assert trained.code == 0, trained.err
    monkeypatch.setattr(lora, "network_dtype", lambda policy: torch.int8)
    path = "run/checkpoints/step_000002"
    found = []
    for rounded in ("false", "true"):
        common = (
            "evaluation.modes=[sampled]",
            "evaluation.filmed=0",
            f"rollout.rounded_weights={rounded}",
        )
        alone = suites.arguments(
            "eval",
            "counting_ppo",
            f"run_dir=alone_{rounded}",
            f"checkpoint={path}",
            "episodes=10",
            *common,
        )
        assert rlinf_vla(*alone).code == 0
        document = json.loads(Path(f"alone_{rounded}/evaluation/step_000002.json").read_text())
        swept = result(
            sweep(f"sweep_{rounded}", f"sweep.policies=[{path}]", "episodes=5", *common)
        )["episodes"]
        rows = [
            {name: each[name] for name in document["sampled"]["episodes"][0]}
            for each in swept
            if each["suite"] == "within 6"
        ]
        assert sorted(rows, key=lambda each: each["seed"]) == document["sampled"]["episodes"]
        found.append(rows)
    assert found[0] != found[1]


def test_a_sweep_resumes(
    sweep: Eval, rlinf_vla: CommandLine, suites: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = told(sweep("whole", *SCRIPTED))
    play = BlockPlayer.play
    played = list[str]()

    def failing(self: BlockPlayer, block: Any, *rest: Any) -> Any:
        if len(played) == 5:
            raise RuntimeError("out of fingers")
        played.append(block.name)
        return play(self, block, *rest)

    monkeypatch.setattr(BlockPlayer, "play", failing)
    arguments = suites.arguments("eval", "counting_ppo", "run_dir=parts", *SCRIPTED)
    assert rlinf_vla(*arguments).code == 1
    (Path("parts") / "blocks" / f"{played[1]}.json").write_text('{"half a')
    before = list(played)
    played.clear()
    played.append("")  # never five
    monkeypatch.setattr(
        BlockPlayer,
        "play",
        lambda self, block, *rest: (played.append(block.name), play(self, block, *rest))[1],
    )
    found = rlinf_vla(*arguments)
    assert found.code == 0 and "found 10 of 56 episodes" in found.out, found.out + found.err
    assert set(played) & set(before) == {before[1]}, "only damaged blocks are repeated"
    assert told(Path("parts")) == whole
    played.clear()
    again = rlinf_vla(*arguments)
    assert "found 56 of 56 episodes" in again.out and not played and told(Path("parts")) == whole


def test_without_a_directory_the_unfinished_sweep_is_resumed(
    rlinf_vla: CommandLine, suites: Counting
) -> None:
    arguments = suites.arguments("eval", "counting_ppo", *SCRIPTED)
    assert rlinf_vla(*arguments).code == 0
    (first,) = Path("runs/counting_ppo").iterdir()
    (first / "result.json").unlink()
    assert "found 56 of 56" in rlinf_vla(*arguments).out, "killed before its end"
    assert "found" not in rlinf_vla(*arguments).out, "a finished sweep is not changed"
    assert "found" not in rlinf_vla(*arguments, "seed=3").out, "another recipe"
    assert len(list(Path("runs/counting_ppo").iterdir())) == 3


def test_a_directory_of_another_sweep_is_refused(
    sweep: Eval, rlinf_vla: CommandLine, suites: Counting, tmp_path: Path
) -> None:
    directory = sweep("out", *SCRIPTED)
    arguments = suites.arguments("eval", "counting_ppo", "run_dir=out", *SCRIPTED)
    assert "episodes was 7 in out and is 8 now" in rlinf_vla(*arguments, "episodes=8").complaint
    kept = json.loads((directory / "environment.json").read_text())
    kept["packages"]["torch"] = "1.0"
    (directory / "environment.json").write_text(json.dumps(kept))
    assert "packages.torch was 1.0" in rlinf_vla(*arguments).complaint
    LinearPolicy(LinearOptions(chunk=2)).save(tmp_path / "mine")
    changing = suites.arguments(
        "eval", "counting_ppo", "run_dir=changing", "sweep.policies=[mine]", "episodes=1"
    )
    assert rlinf_vla(*changing).code == 0
    LinearPolicy(LinearOptions(chunk=2, seed=9)).save(tmp_path / "mine")
    assert "sha256 was" in rlinf_vla(*changing).complaint


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sweep.policies=[nowhere]"], "sweep.policies names nowhere: no such directory"),
        (["sweep.policies=[expert,expert]"], "sweep.policies names expert twice"),
        (["sweep.policies=[nowhere,./nowhere/]"], "sweep.policies names ./nowhere/ twice"),
        (["recipe=counting_eval", "sweep.policies=[start]"], "has no model"),
        (["sweep.policies=[expert]", "sweep.block=0"], "sweep.block=0"),
        (["sweep.policies=[expert]", "sweep.parallel=0"], "sweep.parallel=0"),
        (["sweep.policies=[start]", "evaluation.modes=[]"], "evaluation.modes is empty"),
        (
            ["sweep.policies=[expert]", "checkpoint=somewhere"],
            "checkpoint=somewhere: no such directory",
        ),
        (
            ["recipe=counting_eval", "model=linear", "model.checkpoint=/not/there"],
            "model.checkpoint=/not/there: no such directory",
        ),
        (
            ["sweep.policies=[expert,start]", "model.checkpoint=/not/there"],
            "model.checkpoint=/not/there: no such directory",
        ),
        (
            ["recipe=counting_eval", "model.checkpoint=/not/there"],
            "model.checkpoint=/not/there needs a model",
        ),
        (["sweep.policies=[expert]", "episodes=2000000"], "episodes=2000000"),
        (
            ["sweep.policies=[expert]", "sweep.stop_when_decided=true"],
            "compares two policies, this sweep has 1 (expert)",
        ),
        (
            [
                "sweep.policies=[start]",
                "sweep.stop_when_decided=true",
                "evaluation.probes=[blank_image]",
            ],
            "this sweep has 4",
        ),
        (
            ["evaluation.probes=[blank]"],
            "evaluation.probes[0]=blank is not known: use blank_instruction, shuffled_instruction",
        ),
        (
            ["evaluation.probes=[blank_image,blank_image]"],
            "evaluation.probes names blank_image twice",
        ),
        (["sweep.polices=[expert]"], "did you mean sweep.policies"),
    ],
)
def test_bad_lines(
    rlinf_vla: CommandLine, suites: Counting, overrides: list[str], words: str
) -> None:
    recipe = [] if overrides[0].startswith("recipe=") else ["recipe=counting_ppo"]
    found = rlinf_vla("eval", "--config-dir", str(suites.folder), *recipe, *overrides)
    assert words in found.complaint
    assert not Path("runs").exists()


def test_the_model_of_a_recipe_that_only_evaluates_is_evaluated(
    rlinf_vla: CommandLine, suites: Counting
) -> None:
    """Alone, unless sweep.policies lists others."""
    few = (
        "model=linear",
        f"model.checkpoint={suites.folder}/model",
        "episodes=2",
        "evaluation.modes=[greedy]",
        "evaluation.filmed=0",
    )
    for name, policies, players in (
        ("alone", (), ["start"]),
        ("added", ("sweep.policies=[expert,random]",), ["start", "expert", "random"]),
        ("listed", ("sweep.policies=[expert,start]",), ["expert", "start"]),
        ("path", (f"sweep.policies=[random,{suites.folder}/model]",), ["random", "model"]),
    ):
        found = rlinf_vla(
            *suites.arguments("eval", "counting_eval", f"run_dir={name}", *policies, *few)
        )
        assert found.code == 0 and list(result(Path(name))["policies"]) == players, found.err
    assert verify(rlinf_vla, Path("alone")).code == 0


def test_a_recipe_that_only_evaluates_does_not_train(
    rlinf_vla: CommandLine, suites: Counting
) -> None:
    complaint = rlinf_vla(*suites.arguments("train", "counting_eval")).complaint
    assert "trains nothing" in complaint and "rlinf-vla eval" in complaint


# verify


def verify(rlinf_vla: CommandLine, directory: Path, *arguments: str) -> Any:
    return rlinf_vla("verify", str(directory / "result.json"), *arguments)


def test_a_result_is_verified(sweep: Eval, rlinf_vla: CommandLine) -> None:
    found = verify(
        rlinf_vla, sweep("out", "sweep.policies=[start,random]", "episodes=5"), "--episodes", "11"
    )
    assert (
        found.code == 0
        and "11 of 11 episodes are bit-identical" in found.out
        and "agrees" in found.out
    ), found.out + found.err


def change(directory: Path, alter: Callable[[dict[str, Any]], object]) -> Path:
    document = result(directory)
    alter(document)
    (directory / "result.json").write_text(json.dumps(document))
    return directory


def test_a_changed_result_does_not_agree(sweep: Eval, rlinf_vla: CommandLine) -> None:
    directory = sweep("out", *SCRIPTED)

    def better(document: dict[str, Any]) -> None:
        for each in document["episodes"]:
            each["success"] = True

    found = verify(rlinf_vla, change(directory, better), "--episodes", "56")
    assert (
        found.code == 1
        and "success was True, is False" in found.out
        and "tables do not follow" in found.out
    )
    directory = sweep("tables", *SCRIPTED)
    found = verify(
        rlinf_vla,
        change(directory, lambda document: document["policies"]["random"].update(pc_success=99.0)),
    )
    assert found.code == 1 and "tables do not follow" in found.out and "20 of 20" in found.out


def test_on_another_machine_a_statistical_test_decides(sweep: Eval, rlinf_vla: CommandLine) -> None:
    directory = sweep("out", *SCRIPTED)

    def elsewhere(document: dict[str, Any]) -> None:
        document["environment"]["packages"]["numpy"] = "1.0"
        document["episodes"][30]["steps"] += 1

    found = verify(rlinf_vla, change(directory, elsewhere), "--episodes", "56")
    assert (
        found.code == 0
        and "packages.numpy was 1.0" in found.out
        and "55 of 56" in found.out
        and "p = 1.000" in found.out
    )

    def better(document: dict[str, Any]) -> None:
        for each in document["episodes"]:
            each["success"] = True

    assert verify(rlinf_vla, change(directory, better), "--episodes", "56").code == 1


def test_other_weights_are_named(sweep: Eval, rlinf_vla: CommandLine, tmp_path: Path) -> None:
    LinearPolicy(LinearOptions(chunk=2)).save(tmp_path / "mine")
    directory = sweep("out", "sweep.policies=[mine]", "episodes=3", "evaluation.modes=[greedy]")
    LinearPolicy(LinearOptions(chunk=2, seed=9)).save(tmp_path / "mine")
    assert "policy.mine.sha256 was" in verify(rlinf_vla, directory).out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda document: document.update(format="something"), "is not a sweep's result.json"),
        (lambda document: document.pop("episodes"), "episodes is missing"),
        (lambda document: document["episodes"].pop(), "does not hold the episodes"),
        (lambda document: document["episodes"][0].pop("seed"), "episode 0"),
        (lambda document: document["recipe"].pop("env"), "holds no recipe"),
        (
            lambda document: document["recipe"]["env"].update(name="abacus"),
            "env=abacus is not known",
        ),
        (lambda document: document["recipe"].update(colour="red"), "holds no recipe"),
        (lambda document: document["suites"].pop(), "does not hold"),
        (lambda document: document["suites"].__setitem__(0, "within 6"), "suite 0"),
        (lambda document: document["provenance"].update(expert=None), "policy expert"),
        (lambda document: document["episodes"][1].update(success="yes"), "episode 1"),
    ],
)
def test_a_damaged_result_is_one_line(
    sweep: Eval, rlinf_vla: CommandLine, damage: Callable[[dict[str, Any]], object], words: str
) -> None:
    directory = sweep("out", "sweep.policies=[expert]", "episodes=1", "evaluation.filmed=0")
    assert words in verify(rlinf_vla, change(directory, damage)).complaint


def test_bad_lines_of_verify(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    assert "cannot be read" in rlinf_vla("verify", "nowhere.json").complaint
    (tmp_path / "half.json").write_text('{"format"')
    assert "no JSON" in rlinf_vla("verify", "half.json").complaint
    assert "RESULT.json" in rlinf_vla("verify").complaint
    assert "must be at least 1" in rlinf_vla("verify", "half.json", "--episodes", "0").complaint
    assert "invalid int value" in rlinf_vla("verify", "half.json", "--episodes", "few").complaint


# in separate processes


@pytest.fixture
def spawned(counting: Counting, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``rlinf-vla eval`` on counter world in a separate process, in ``tmp_path``."""
    announce(tmp_path / "package")
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path / 'package'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def start(*overrides: str) -> subprocess.Popen[str]:
        arguments = counting.arguments("eval", "counting_ppo", "evaluation.filmed=0", *overrides)
        command = [sys.executable, "-m", "rlinf_vla.cli.main", *arguments]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def children(pid: int) -> list[int]:
    """Living processes whose parent is ``pid``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_for(
    condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 200
) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    return found


WAITING = """
import sys, time
from pathlib import Path

if "rlinf_vla.features.sweeps.block_workers" in sys.orig_argv:
    replace = Path.replace

    def once_it_may(self, target):
        while len(list(target.parent.glob("[!.]*.json"))) >= (10 if Path("more").exists() else 4):
            time.sleep(0.02)
        return replace(self, target)

    Path.replace = once_it_may
"""
"""Workers that write four blocks, and ten once there is a file ``more``: the sweep does not end meanwhile."""


@pytest.mark.slow
def test_a_killed_parallel_sweep_resumes(
    spawned: Callable[..., subprocess.Popen[str]], sweep: Eval, tmp_path: Path
) -> None:
    """kill -9 of a worker process, then of the command; the result equals that of one undisturbed process."""
    work = ("sweep.policies=[start,random]", "episodes=8", "sweep.block=1")

    def finished() -> int:
        return len(
            list((tmp_path / "out" / "blocks").glob("[!.]*.json"))
        )  # with a dot: a file that was being written

    (program := tmp_path / "package" / "sitecustomize.py").write_text(WAITING)
    process = spawned("run_dir=out", *work, "sweep.parallel=2")
    try:
        wait_for(lambda: finished() > 3, process)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        (tmp_path / "more").touch()
        wait_for(lambda: finished() > 9, process)
    finally:
        workers = children(process.pid)
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert not (tmp_path / "out" / "result.json").exists()
    wait = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < wait:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers), "they end with the command"
    kept = finished()
    program.unlink()
    again = spawned("run_dir=out", *work, "sweep.parallel=2")
    said = again.communicate(timeout=280)[0]
    assert again.returncode == 0 and f"found {kept} of 96 episodes" in said, said
    assert told(tmp_path / "out") == told(sweep("whole", *work, "evaluation.filmed=0"))


def test_a_worker_that_always_dies_ends_the_sweep(
    spawned: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    dying = "import os, sys\nif 'rlinf_vla.features.sweeps.block_workers' in sys.orig_argv:\n    os._exit(9)\n"
    (tmp_path / "package" / "sitecustomize.py").write_text(dying)
    process = spawned("run_dir=out", "sweep.policies=[expert]", "episodes=2", "sweep.parallel=2")
    said = process.communicate(timeout=280)[0]
    assert process.returncode == 1, said
    assert said.splitlines()[-1].startswith(
        "rlinf-vla: 3 processes in a row died or hung while playing block 00_000_0"
    ), said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_worker_that_always_hangs_ends_the_sweep(
    spawned: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = spawned(
        "run_dir=out",
        "sweep.policies=[expert]",
        "episodes=2",
        "sweep.parallel=2",
        "cluster.call_timeout_s=0.05",
    )
    said = process.communicate(timeout=280)[0]
    assert (
        process.returncode == 1 and "3 processes in a row died or hung" in said.splitlines()[-1]
    ), said
