"""A skip that is not on the list fails the run, on workers and in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.skips import ALLOWED, NOT_INSTALLED, WITH_ALL_EXTRAS, WITH_ALL_PEERS, SkipCheck

pytest_plugins = ["pytester"]

TESTS = f"""
import pytest

@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.skipif(True, reason={NOT_INSTALLED + "genesis"!r})
def test_extra(number): pass

@pytest.mark.skipif({{own}}, reason="I do not feel like it")
def test_own(): pass

@pytest.mark.skipif(True, reason="has a GPU")
def test_gpu(): pass

@pytest.mark.skipif(True, reason="make cluster-test")
def test_cluster(): pass

@pytest.mark.xfail
def test_expected(): assert False
"""
MODULE = f"""
import pytest
pytest.skip({NOT_INSTALLED + "peers"!r}, allow_module_level=True)
"""
CONFTEST = """
from tests.skips import SkipCheck

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipCheck({all_extras}, {all_extras}, []))
"""


@pytest.fixture(params=["", "-n2"])
def run(request: pytest.FixtureRequest, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))

    def once(own: bool, all_extras: bool) -> pytest.RunResult:
        pytester.makeconftest(CONFTEST.format(all_extras=all_extras))
        pytester.makepyfile(test_some=TESTS.format(own=own), test_module=MODULE)
        return pytester.runpytest_subprocess(*request.param.split(), "-p", "no:cacheprovider")

    return once


def test_missing_extras_are_allowed(run) -> None:  # type: ignore[no-untyped-def]
    found = run(own=False, all_extras=False)
    assert found.ret == pytest.ExitCode.OK
    found.stdout.fnmatch_lines(["2 skipped: not installed: EXTRAS=genesis"])


def test_no_extra_may_be_missing_with_all_extras(run) -> None:  # type: ignore[no-untyped-def]
    found = run(own=False, all_extras=True)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["2 skipped: not installed: EXTRAS=genesis: NOT ALLOWED*"])


def test_any_other_skip_fails(run) -> None:  # type: ignore[no-untyped-def]
    found = run(own=True, all_extras=False)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(
        ["1 skipped: I do not feel like it: NOT ALLOWED*", "1 skipped: has a GPU (*"]
    )


def test_what_ci_prepares_is_not_skipped_there() -> None:
    assert ALLOWED.keys() >= WITH_ALL_EXTRAS | WITH_ALL_PEERS
    everywhere = SkipCheck(False, False, [])
    in_ci = SkipCheck(True, False, [])
    nightly = SkipCheck(True, True, [])
    for reason in WITH_ALL_EXTRAS:
        assert everywhere.allowed(reason) and not in_ci.allowed(reason)
    for reason in WITH_ALL_PEERS:
        assert in_ci.allowed(reason) and not nightly.allowed(reason)
