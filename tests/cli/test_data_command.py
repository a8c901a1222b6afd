"""``rlinf-vla data``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.data.episodes import write
from tests.data.old_versions import V20, rewrite

STATISTICS = ("data", "statistics")


@pytest.fixture(autouse=True)
def pushes(tmp_path: Path) -> None:
    write(tmp_path / "pushes")


def test_the_files_of_each_family(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    rewrite(tmp_path / "pushes", tmp_path / "older", V20)
    for layout, words, files in (
        ("openpi", ["horizon=3", "delta_mask=[1,-1]"], ["norm_stats.json"]),
        ("openvla", ["mask=[1,-1]"], ["dataset_statistics.json"]),
        ("lerobot", [], ["stats.json", "stats.safetensors"]),
    ):
        command = [*STATISTICS, "pushes", "older", f"output={layout}", f"layout={layout}", *words]
        found = rlinf_vla(*command)
        assert found.code == 0, found.err
        assert found.out.startswith("6 episodes, 30 frames, states of 3 and actions of 2 numbers: ")
        assert sorted(path.name for path in (tmp_path / layout).iterdir()) == files
        assert f"{layout}/{files[0]} is there: delete it" in rlinf_vla(*command).complaint
    document = json.loads((tmp_path / "openvla/dataset_statistics.json").read_text())
    assert document["pushes"] == document["older"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["dance"], "data needs one of statistics: rlinf-vla data statistics pushes"),
        (["statistics"], "data statistics needs a dataset: rlinf-vla data statistics DATASET"),
        (
            ["statistics", "pushes", "horizon=3"],
            "output= cannot be used: use text that is not blank",
        ),
        (["statistics", "pushes", "output=x"], "layout=openpi needs horizon=N"),
        (["statistics", "nowhere", "output=x", "horizon=3"], "nowhere is not a directory"),
        (
            ["statistics", "pushes", "ouput=x"],
            "data statistics has no key ouput; did you mean output?",
        ),
        (["statistics", "pushes", "output=x", "horizon=0"], "horizon=0 is out of range"),
        (
            ["statistics", "pushes", "output=x", "horizon=many"],
            "data statistics: Value 'many' of type",
        ),
        (["statistics", "pushes", "output=x", "horizon=[3"], "data statistics: "),
        (["statistics", "pushes", "output=x", "layout=octo"], "layout=octo is not known"),
        (
            ["statistics", "pushes", "output=x", "layout=openvla", "horizon=3"],
            "layout=openvla has statistics of single, absolute actions",
        ),
        (
            ["statistics", "pushes", "output=x", "layout=lerobot", "mask=[1]"],
            "layout=lerobot scales all dimensions",
        ),
        (
            ["statistics", "pushes", "output=x", "horizon=3", "action_key=actions"],
            "pushes has no feature actions (it has ",
        ),
        (
            [
                "statistics",
                "pushes",
                "output=x",
                "horizon=3",
                "action_key=observation.images.front",
            ],
            "observation.images.front is image [32, 48, 3], a vector of numbers is needed",
        ),
        (
            ["statistics", "pushes", "output=x", "horizon=3", "delta_mask=[6,-1]"],
            "delta_mask=[6, -1] covers 7 dimensions, there are 2",
        ),
        (
            ["statistics", "pushes", "./pushes", "output=x", "layout=openvla"],
            "two datasets are called pushes",
        ),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(
    rlinf_vla: CommandLine, tmp_path: Path, words: list[str], complaint: str
) -> None:
    assert complaint in rlinf_vla("data", *words).complaint
    assert not (tmp_path / "x").exists()
