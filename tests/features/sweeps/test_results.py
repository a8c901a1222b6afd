from __future__ import annotations

import csv
import io
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.evaluation.statistics import mcnemar_exact, wilson_interval
from rlinf_vla.features.sweeps.results import COLUMNS, as_csv, tables

SUITES = {"one": ("push", "pull"), "two": ("push",)}


@st.composite
def episodes(draw: st.DrawFn) -> list[dict[str, Any]]:
    count = draw(st.integers(1, 6))
    return [
        {
            "policy": policy,
            "probe": "none",
            "suite": suite,
            "task": task,
            "seed": seed,
            "instruction": draw(st.text(max_size=8)),
            "success": draw(st.booleans()),
            "steps": 3,
            "return": 0.1,
        }
        for policy in ("a", "b", "c")
        for suite, names in SUITES.items()
        for task in names
        for seed in range(count)
    ]


@given(episodes())
def test_tables_are_sums_over_episodes(played: list[dict[str, Any]]) -> None:
    found = tables(played)
    won = Counter(
        (each["policy"], each["suite"], each["task"]) for each in played if each["success"]
    )
    for policy, of_policy in found["policies"].items():
        assert of_policy["n_success"] == sum(
            count for key, count in won.items() if key[0] == policy
        )
        assert list(of_policy["per_suite"]) == list(SUITES)
        for suite, block in of_policy["per_suite"].items():
            assert list(block["per_task"]) == list(SUITES[suite])
            for task, counts in block["per_task"].items():
                assert counts["n_success"] == won[policy, suite, task]
                interval = wilson_interval(counts["n_success"], counts["n_episodes"])
                assert counts["pc_success_ci95"] == pytest.approx([100 * edge for edge in interval])
    assert [
        (each["before"], each["after"]) for each in found["differences"] if each["suite"] is None
    ] == [
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    ]
    for each in found["differences"]:
        chosen = [row for row in played if each["suite"] in (None, row["suite"])]
        first, second = (
            [row["success"] for row in chosen if row["policy"] == each[moment]]
            for moment in ("before", "after")
        )
        assert each["n_pairs"] == len(first) and each["p_value"] == mcnemar_exact(first, second)
        assert each["n_gained"] - each["n_lost"] == sum(second) - sum(first)


@given(episodes())
def test_csv_contains_the_episodes(played: list[dict[str, Any]]) -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(played), newline="")))
    assert list(lines[0]) == list(COLUMNS) and len(lines) == len(played)
    for line, each in zip(lines, played, strict=True):
        assert (line["policy"], line["task"], int(line["seed"]), bool(int(line["success"]))) == (
            *(each["policy"], each["task"], each["seed"], each["success"]),
        )
        assert line["instruction"] == each["instruction"]


def test_policies_are_paired_by_episode_and_not_by_position() -> None:
    def played(policy: str, outcomes: dict[int, bool]) -> list[dict[str, Any]]:
        common = {
            "policy": policy,
            "probe": "none",
            "suite": "one",
            "task": "push",
            "instruction": "",
            "steps": 1,
            "return": 0.0,
        }
        return [common | {"seed": seed, "success": won} for seed, won in outcomes.items()]

    (found,) = tables(
        played("a", {1: False, 2: True, 9: True}) + played("b", {2: True, 1: True, 7: False})
    )["differences"]
    assert (found["n_pairs"], found["n_gained"], found["n_lost"]) == (2, 1, 0)
    assert tables(played("a", {1: True}) + played("b", {2: True}))["differences"] == [], (
        "nothing in common"
    )
