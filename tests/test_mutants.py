"""The list of mutants is up to date: its texts occur in the code, and the tests that it names exist."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests import mutate

LISTED = mutate.listed()


@pytest.mark.parametrize("path", sorted({mutant.path for mutant in LISTED}))
def test_every_listed_text_occurs_once_in_its_file(path: str) -> None:
    right = (mutate.ROOT / path).read_text()
    changed = set()
    for mutant in (each for each in LISTED if each.path == path):
        wrong = mutant.applied(mutate.ROOT)
        ast.parse(wrong)
        assert wrong != right and wrong not in changed, (
            f"{mutant.what}: nothing is replaced, or by the same text"
        )
        changed.add(wrong)


def test_the_tests_that_it_names_exist() -> None:
    for test in {test for mutant in LISTED for test in mutant.tests}:
        file, *names = test.split("::")
        functions = {
            node.name
            for node in ast.walk(ast.parse((mutate.ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert {name.partition("[")[0] for name in names} <= functions, test


def test_a_text_that_does_not_occur_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"occurs 0 times, not once: bring tests/mutants up to date"
    ):
        replace(LISTED[0], old="nobody wrote this").applied(mutate.ROOT)


def test_a_copy_has_all_packages_where_they_are_installed(tmp_path: Path) -> None:
    copy = mutate.copied(tmp_path, mutate.ROOT / "tests")
    for package in ("models", "envs", "rewards", "robots"):
        assert (
            copy / "rlinf_vla" / package / "__init__.py"
        ).resolve() == copy / package / "__init__.py"
    assert not list(copy.rglob("*.pyc"))


def test_the_page_has_counts_and_names() -> None:
    some = [
        replace(LISTED[0], what="first"),
        replace(LISTED[0], what="second", survived_before=True),
    ]
    found = mutate.page(some, [mutate.KILLED, mutate.SURVIVED], 120.0)
    assert (
        "**1 of 2 killed (50.0 %).**" in found and f"| `{some[0].path}` | 2 | 1 | 1 | 1 |" in found
    )
    before, _, now = found.partition("## Survive now")
    assert f"* `{some[0].path}`: second" in before and "second" in now and "first" not in now
