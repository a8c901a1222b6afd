"""What tests/run.py makes of a run: which tests are repeated, which are flaky, and when the run fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import run
from tests.record import BUDGET_S, Failure, Found, dearest

FLAKY_ONCE = """
from pathlib import Path
import pytest

def test_good(): pass

def test_once():
    if not Path("ran").exists():
        Path("ran").touch()
        assert 0, "the first failure"

def test_never():
    assert {right}

@pytest.mark.skipif({skips}, reason="I do not feel like it")
def test_skipped(): pass
"""


def failed(*names: str, in_teardown: bool = False) -> Found:
    return Found(
        failures={name: Failure("why", in_teardown) for name in names},
        cpu_s=dict.fromkeys(names, 0.0),
    )


def passed(*names: str) -> Found:
    return Found(cpu_s=dict.fromkeys(names, 0.0))


def test_what_fails_once_is_flaky_and_what_fails_twice_has_failed() -> None:
    verdict = run.judge(failed("a::x", "a::y"), failed("a::y") + passed("a::x"), "")
    assert (verdict.flaky, verdict.failed, verdict.refused, verdict.passed) == (
        ["a::x"],
        ["a::y"],
        [],
        False,
    )
    assert run.judge(failed("a::x"), passed("a::x"), "").passed


def test_what_is_not_repeated_has_failed() -> None:
    assert run.judge(failed("a::x"), Found(), "").failed == ["a::x"]


def test_a_module_is_repeated_that_left_something_behind() -> None:
    first = failed("a::last", in_teardown=True)
    assert run.to_repeat(first) == ["a"]
    assert run.judge(first, passed("a::first", "a::last"), "").flaky == ["a::last"]
    again = run.judge(first, passed("a::last") + failed("a::first"), "")
    assert again.failed == ["a::last", "a::first"]


def test_more_than_three_flaky_tests_fail_the_run() -> None:
    names = [f"a::{number}" for number in range(4)]
    assert run.judge(failed(*names[:3]), passed(*names), "").passed
    assert "at most 3 may" in run.judge(failed(*names), passed(*names), "").refused[0]


def test_a_test_that_is_listed_already_fails_the_run(tmp_path: Path) -> None:
    listed = tmp_path / "flaky.md"
    listed.write_text("")
    run.note(["a::x[1|2]"], listed)
    run.note(["a::x[1|2]", "a::y"], listed)
    lines = listed.read_text().splitlines()
    assert (
        len(lines) == 2
        and lines[0].startswith(r"| `a::x[1\|2]` | 20")
        and lines[0].endswith("| not known yet |")
    )
    verdict = run.judge(failed("a::x[1|2]"), passed("a::x[1|2]"), listed.read_text())
    assert not verdict.passed and "mend it first" in verdict.refused[0]


def test_what_no_repetition_changes_fails_the_run() -> None:
    assert not run.judge(Found(refused=["a skip"]), Found(), "").passed


def test_the_longest_files_are_named_in_order() -> None:
    seconds = {"a.py::one": 30.0, "a.py::two": 60.0, "b.py::one": 120.0}
    found = Found(cpu_s=dict.fromkeys(seconds, 1.0), seconds=seconds)
    _, *lines = run.longest(found)
    assert [line.split() for line in lines] == [["2.00", "1", "b.py"], ["1.50", "2", "a.py"]]


def test_the_dearest_are_named_if_one_is_above_the_budget() -> None:
    assert dearest(Found(cpu_s={"a": BUDGET_S})) == []
    lines = dearest(Found(cpu_s={"a": BUDGET_S, "b": 2 * BUDGET_S}))
    assert lines[0].startswith("1 tests took more than 2 CPU-seconds") and lines[1].split() == [
        "4.0",
        "b",
    ]


@pytest.mark.parametrize(
    ("right", "skips", "code", "words"),
    [
        (True, False, True, ["FLAKY test_it.py::test_once", "the first failure", "passed"]),
        (False, False, False, ["FLAKY test_it.py::test_once", "FAILED test_it.py::test_never"]),
        (True, True, False, ["REFUSED test_it.py::test_skipped is skipped: I do not feel like it"]),
    ],
)
def test_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    right: bool,
    skips: bool,
    code: bool,
    words: list[str],
) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_configure\n"
    )
    (tmp_path / "test_it.py").write_text(FLAKY_ONCE.format(right=right, skips=skips))
    (tmp_path / "flaky.md").write_text("")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "FLAKY", tmp_path / "flaky.md")
    options = (
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "--basetemp",
        "temporary",
    )
    monkeypatch.setattr(run, "REPEATED", run.Part("repeated", options, ""))
    _, verdict, _ = run.run_parts([run.Part("all", options, "")], [], [])
    said = capfd.readouterr().out
    assert verdict.passed is code and all(word in said for word in words), said
    assert "all" in said and "repeated" in said and "CPU-seconds" in said
    assert (tmp_path / "flaky.md").read_text().startswith("| `test_it.py::test_once` |")


def test_the_page_has_a_row_for_each_folder() -> None:
    seconds = {
        "tests/cli/test_cli.py::x": 60.0,
        "tests/cli/test_new.py::y": 120.0,
        "tests/test_run.py::z": 6.0,
    }
    found = Found(
        dict.fromkeys(seconds, 1.5), seconds, {"tests/test_run.py::z": Failure("why", False)}
    )
    text = run.page(
        "make test",
        [run.Ran(run.NIGHTLY[0], 3.0, found)],
        run.Verdict(failed=["tests/test_run.py::z"]),
        found,
    )
    assert "**2 of 3 tests passed at once, 0 when repeated, 1 failed.**" in text
    assert "| `tests/cli` | 2 | 3.0 | 3 |" in text and "| `tests` | 1 | 0.1 | 2 |" in text


def test_a_run_that_cannot_begin_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    ran = run.pytest_once(
        run.Part("all", ("-n", "0", "-p", "no:cacheprovider"), ""), ["--no-such-option"], []
    )
    assert ran.found.refused == ["all: pytest ended with exit code 4"], sys.executable
