"""``rlinf-vla compare`` on recorded evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.evaluation.statistics import paired_episodes
from rlinf_vla.features.sweeps.results import FORMAT
from tests.cli.conftest import CommandLine

Record = Callable[..., str]


def played(
    won: range, seeds: range = range(40), tasks: tuple[str, ...] = ("push", "pull")
) -> list[dict[str, Any]]:
    return [
        {"task": task, "seed": seed, "success": seed in won, "steps": 5 + seed % 3}
        for task in tasks
        for seed in seeds
    ]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Writes an evaluation of a run, in a file of that name."""

    def write(name: str, **modes: list[dict[str, Any]]) -> str:
        (tmp_path / name).write_text(
            json.dumps(
                {"checkpoint": "x"} | {mode: {"episodes": rows} for mode, rows in modes.items()}
            )
        )
        return name

    return write


def test_two_evaluations_of_the_same_episodes(
    rlinf_vla: CommandLine, record: Record, tmp_path: Path
) -> None:
    before = played(range(10))
    after = played(range(5, 30))
    files = record("before.json", greedy=before, sampled=before), record("after.json", greedy=after)
    found = rlinf_vla(
        "compare", f"start={files[0]}:greedy", f"trained={files[1]}", "--output", "all.json"
    )
    assert found.code == 0, found.err
    document = json.loads((tmp_path / "all.json").read_text())
    (difference,) = document["differences"]
    again = rlinf_vla(
        "compare",
        f"start={files[0]}:greedy",
        f"trained={files[1]}",
        "--json",
        "--output",
        "again.json",
    )
    assert json.loads(again.out) == document and "again.json" in again.err
    assert difference["paired"] == paired_episodes(before, after) and difference[
        "pc_difference"
    ] == pytest.approx(37.5)
    assert (
        "40 gained, 10 lost" in found.out
        and "trained is better, known after" in found.out
        and "25.0 %" in found.out
    )
    method = document["methods"]["trained"]
    assert (method["n_runs"], method["n_tasks"], method["n_episodes"], method["pc_success"]) == (
        1,
        2,
        80,
        62.5,
    )
    assert {task: each["pc_success"] for task, each in method["per_task"].items()} == {
        "push": 62.5,
        "pull": 62.5,
    }
    assert {task: each["pc_difference"] for task, each in difference["per_task"].items()} == {
        "push": 37.5,
        "pull": 37.5,
    }
    low, high = difference["per_task"]["pull"]["pc_difference_ci95"]
    assert 0 < low < 37.5 < high and f"+37.5 points ({low:+.1f} to {high:+.1f})" in found.out
    assert method["pc_interquartile_mean_ci95"] is None and "one run: no interval" in found.out
    assert method["time_to_success"]["pc_solved"][-1] == 62.5 and method["profile"]["pc_above"][
        :2
    ] == [100, 100]


def test_a_figure_draws_every_method(
    rlinf_vla: CommandLine, record: Record, tmp_path: Path
) -> None:
    """With a band around the profile of several runs."""
    files = [
        record(f"{name}.json", greedy=played(range(won)))
        for name, won in (("a", 10), ("b", 30), ("c", 20))
    ]
    methods = f"start={files[0]}", f"trained={files[1]},{files[2]}"
    drawn = []
    for name in ("one.svg", "two.svg"):
        assert rlinf_vla("compare", *methods, "--figure", name).code == 0
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1], "the same results give the same file"
    for words in ("start", "trained", "performance profile", "time to success", "control steps"):
        assert f">{words}<" in drawn[0]
    assert drawn[0].count('id="FillBetween') == 1


def test_episodes_that_differ_are_compared_as_independent(
    rlinf_vla: CommandLine, record: Record, tmp_path: Path
) -> None:
    files = (
        record("one.json", greedy=played(range(0))),
        record("two.json", greedy=played(range(100, 140), range(100, 140))),
    )
    found = rlinf_vla("compare", f"a={files[0]}", f"b={files[1]}", "--output", "all.json")
    assert found.code == 0 and "b is better" in found.out, found.err
    (difference,) = json.loads((tmp_path / "all.json").read_text())["differences"]
    assert (
        "paired" not in difference
        and difference["unpaired"]["n_rounds"] == 40
        and difference["unpaired"]["better"] == "after"
    )


def test_a_comparison_at_any_time_is_of_all_tasks(
    rlinf_vla: CommandLine, record: Record, tmp_path: Path
) -> None:
    """One of two tasks shares no episode, and the other was played more often."""
    first = played(range(30), range(30), ("pull",)) + played(range(0), range(10), ("push",))
    second = played(range(0), range(30), ("pull",)) + played(
        range(50, 60), range(50, 60), ("push",)
    )
    files = record("one.json", greedy=first), record("two.json", greedy=second)
    found = rlinf_vla("compare", f"a={files[0]}", f"b={files[1]}", "--output", "all.json")
    assert found.code == 0, found.err
    (difference,) = json.loads((tmp_path / "all.json").read_text())["differences"]
    assert (
        "paired" not in difference
        and difference["unpaired"]["better"] is None
        and difference["unpaired"]["n_rounds"] == 10
    )
    assert "40 episodes left out" in " ".join(found.out.split()) and difference["n_left_out"] == 40
    record(
        "two.json",
        greedy=played(range(0), range(30), ("pull",)) + played(range(10), range(5, 60), ("push",)),
    )
    found = rlinf_vla("compare", f"a={files[0]}", f"b={files[1]}", "--output", "all.json")
    (difference,) = json.loads((tmp_path / "all.json").read_text())["differences"]
    assert (
        difference["paired"]["n_pairs"] == 35
        and difference["paired"]["anytime"]["n_rounds"] == 5
        and difference["n_left_out"] == 105
    )


def test_several_runs_of_a_method(rlinf_vla: CommandLine, record: Record, tmp_path: Path) -> None:
    """Also of a sweep, whose columns are policies with their probes."""
    runs = [record(f"{number}.json", greedy=played(range(10 + 5 * number))) for number in range(3)]
    rows = [
        each | {"policy": "start", "probe": probe, "suite": "s"}
        for probe in ("none", "blank_image")
        for each in played(range(4))
    ]
    (tmp_path / "result.json").write_text(json.dumps({"format": FORMAT, "episodes": rows}))
    methods = (
        f"ours={','.join(runs)}",
        f"less={runs[0]}",
        "blank=result.json:start with blank_image",
    )
    found = rlinf_vla("compare", *methods, "--output", "all.json")
    assert found.code == 0, found.err
    document = json.loads((tmp_path / "all.json").read_text())
    ours = document["methods"]["ours"]
    assert ours["n_runs"] == 3 and ours["pc_success"] == pytest.approx(37.5)
    assert ours["pc_interquartile_mean_ci95"][0] < 37.5 < ours["pc_interquartile_mean_ci95"][1]
    pairs = [("ours", "less"), ("ours", "blank"), ("less", "blank")]
    assert [(each["before"], each["after"]) for each in document["differences"]] == pairs
    assert document["differences"][2]["paired"]["n_pairs"] == 80, (
        "a run's tasks have no suite, and are the same"
    )


def test_tasks_of_several_suites_are_not_those_of_a_run(
    rlinf_vla: CommandLine, record: Record, tmp_path: Path
) -> None:
    """A task is named by its suite, too, where two suites name one alike."""
    rows = [
        each | {"policy": "start", "probe": "none", "suite": suite}
        for suite in "ab"
        for each in played(range(4))
    ]
    (tmp_path / "result.json").write_text(json.dumps({"format": FORMAT, "episodes": rows}))
    found = rlinf_vla(
        "compare", f"run={record('run.json', greedy=played(range(9)))}", "sweep=result.json"
    )
    assert found.code == 0 and "run → sweep: not compared, they played different tasks" in found.out


def test_independent_episodes_are_compared_within_a_task_of_a_suite(
    rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    """Two equal policies: an easy task that both succeed in, and a hard one of the same name, played unequally often."""
    for name, first, counts in (
        ("a", 0, {"easy": 20, "hard": 60}),
        ("b", 100, {"easy": 60, "hard": 20}),
    ):
        rows = [
            {
                "policy": "p",
                "probe": "none",
                "suite": suite,
                "task": "push",
                "seed": first + k,
                "success": suite == "easy",
                "steps": 3,
            }
            for suite, count in counts.items()
            for k in range(count)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps({"format": FORMAT, "episodes": rows}))
    found = rlinf_vla("compare", "a=a.json", "b=b.json")
    assert found.code == 0 and "neither is shown to be better" in found.out, found.out


def test_names_are_printed_as_given(rlinf_vla: CommandLine, record: Record, tmp_path: Path) -> None:
    """Not read as markup. A directory may have a colon."""
    (tmp_path / "x:1").mkdir()
    file = record("x:1/run.json", greedy=played(range(9)))
    found = rlinf_vla(
        "compare", f"ppo[x]={file}", f"ppo[/y]={file}:greedy", "--figure", "new/all.svg"
    )
    assert (
        found.code == 0
        and "ppo[x] → ppo[/y] (95 %): +0.0 points" in found.out
        and (tmp_path / "new" / "all.svg").exists()
    ), found.err


@pytest.mark.parametrize(
    ("task", "kinds"),
    [
        (
            "PutOnPlateInScene25",
            (
                "Main-v3",
                "Position-v1-test",
                "EEPose-v1-test",
                "PositionChangeTo-v1-test",
                "VisionImage-v1-test",
            ),
        ),
        ("PutOnPlate25", ("", "Position", "RobotPose", "MovedObject", "NoiseWeak")),
    ],
)
def test_a_paper_beside_ours(
    rlinf_vla: CommandLine, record: Record, tmp_path: Path, task: str, kinds: tuple[str, ...]
) -> None:
    """Rows of which a task is missing are left out; a method of the paper's is compared with it."""
    names = [f"{task}{kind}" for kind in kinds]
    files = [record(f"{n}.json", greedy=played(range(n), tasks=tuple(names))) for n in (20, 39)]
    methods = f"ppo={files[1]}", f"mine={files[0]}"
    found = rlinf_vla("compare", *methods, "--published", "rlinf_openvla", "--output", "all.json")
    assert found.code == 0, found.err
    paper = json.loads((tmp_path / "all.json").read_text())["published"]
    assert ("ours is PutOnPlate25" in paper["note"]) == (task == "PutOnPlate25")
    assert list(paper["rows"]) == ["In distribution", "Execution"] and paper["missing"] == [
        "Vision",
        "Semantics",
    ]
    row = paper["rows"]["Execution"]
    assert (
        row["paper"]["ppo"] == 85.42
        and row["ours"]["ppo"]["pc_success"] == 97.5
        and row["ours"]["mine"]["pc_success"] == 50
    )
    low, high = row["ours"]["ppo"]["pc_success_ci95"]
    assert row["verdict"] == {"ppo": "above"} and 85.42 < low < 97.5 <= high
    assert paper["rows"]["In distribution"]["verdict"] == {"ppo": "agrees"}
    assert "not in these results: Vision, Semantics" in " ".join(found.out.split())


def test_a_paper_is_not_compared_with_some_tasks_of_a_suite(
    rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    for count in (1, 10):
        rows = [
            each | {"policy": "ppo", "probe": "none", "suite": "libero_spatial"}
            for each in played(range(40), tasks=tuple(f"task {number}" for number in range(count)))
        ]
        (tmp_path / "result.json").write_text(json.dumps({"format": FORMAT, "episodes": rows}))
        assert (
            rlinf_vla(
                "compare", "ppo=result.json", "--published", "pirl_pi0", "--output", f"{count}.json"
            ).code
            == 0
        )
    verdicts = [
        json.loads((tmp_path / name).read_text())["published"]["rows"]["Spatial"]["verdict"]
        for name in ("1.json", "10.json")
    ]
    assert verdicts == [{"ppo": "1 of 10 tasks"}, {"ppo": "above"}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "NAME=FILE"),
        (["run.json"], "run.json is not NAME=FILE"),
        (["a=one.json", "a=one.json"], "a is given twice"),
        (["a=nowhere.json"], "nowhere.json cannot be read"),
        (["a=half.json"], "no JSON"),
        (["a=empty.json"], "holds no episodes"),
        (["a=one.json"], "write FILE:COLUMN with one of sampled, greedy"),
        (["a=one.json:expert"], "names no column"),
        (["a=odd.json"], "odd.json is damaged (episode 1)"),
        (["a=one.json:greedy,other.json"], "a cannot be summarised"),
        (["a=twice.json"], "a cannot be summarised (seed 0 of push twice)"),
        (["a=one.json:greedy,./one.json:greedy"], "names a run twice"),
        (["a=one.json:greedy", "--output", "."], "cannot be written"),
        (["a=one.json:greedy", "--figure", "one.json/x.svg"], "cannot be written"),
        (
            ["a=one.json:greedy", "--figure", "all.gif"],
            "--figure all.gif must end in .svg, .png, .pdf",
        ),
        (
            ["a=one.json:greedy", "--published", "nobody"],
            "--published nobody is not known: choose from",
        ),
        (
            ["a=one.json:greedy", "--published", "pirl_pi0"],
            "no row of πRL, π₀, LIBERO is in the results",
        ),
    ],
)
def test_bad_lines(
    rlinf_vla: CommandLine, record: Record, tmp_path: Path, arguments: list[str], words: str
) -> None:
    record("one.json", greedy=played(range(3)), sampled=played(range(3)))
    record("other.json", greedy=played(range(3), tasks=("stack",)))
    record("twice.json", greedy=[*played(range(3)), played(range(1))[0]])
    record("odd.json", greedy=[played(range(1))[0], {"task": "push"}])
    (tmp_path / "half.json").write_text("{")
    (tmp_path / "empty.json").write_text("[]")
    assert words in rlinf_vla("compare", *arguments).complaint
