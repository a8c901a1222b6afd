"""``rlinf-vla new`` writes packages that pass their own tests and train, outside the repository."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlinf_vla.cli.new import rendered
from rlinf_vla.cli.verbs import PLUGINS
from rlinf_vla.core import plugins
from tests.cli.conftest import CommandLine

pytestmark = pytest.mark.machine  # commands that start processes

QUICK = (
    "iterations=1",
    "evaluation.before_and_after=false",
    "checkpoints.every=1",
    "run_dir=run",
    "cluster=laptop",
)


def loaded(name: str, text: str) -> ModuleType:
    """Import a module from its text."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return module


def suites(kind: str) -> dict[str, Any]:
    """Return the tests of a package ``own_KIND``, to be run here."""
    files = rendered(kind, f"own_{kind}")
    loaded(f"own_{kind}", files[f"own_{kind}.py"])
    found = vars(loaded(f"test_own_{kind}", files[f"test_own_{kind}.py"]))
    return {
        name: each
        for name, each in found.items()
        if name.startswith(("Test", "test_")) and each.__module__ == f"test_own_{kind}"
    }


globals().update({name: each for kind in PLUGINS for name, each in suites(kind).items()})
globals()[
    "TestOwnAlgorithm"
].on_ray = False  # it takes long, and tests/testing has the suite's run on Ray


@pytest.fixture(autouse=True, scope="module")
def processes_find_the_simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("installed")
    (folder / "own_env.py").write_text(rendered("env", "own_env")["own_env.py"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.mark.parametrize("kind", [kind for kind in PLUGINS if kind != "robot"])
def test_its_recipe_trains(
    rlinf_vla: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not at the robot, in real time."""
    assert rlinf_vla("new", kind, f"own_{kind}x").code == 0
    package = tmp_path / f"own_{kind}x"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
    for group, points in project["entry-points"].items():
        plural = group.removeprefix("rlinf_vla.")
        known = dict(plugins.Installed(group)) | {
            name: EntryPoint(name, place, group).load() for name, place in points.items()
        }
        monkeypatch.setattr(plugins, plural, lambda known=known: known)
    monkeypatch.chdir(package)
    trained = rlinf_vla("train", "--config-dir", "recipes", f"recipe={package.name}", *QUICK)
    assert trained.code == 0, trained.out + trained.err
    assert (package / "run" / "checkpoints" / "step_000001" / "COMPLETE").exists()


@pytest.mark.parametrize("kind", PLUGINS)
def test_its_commands_name_what_it_has(rlinf_vla: CommandLine, tmp_path: Path, kind: str) -> None:
    assert rlinf_vla("new", kind, "two_words").code == 0
    package = tmp_path / "two_words"
    assert sorted(path.name for path in package.iterdir()) == [
        *(
            "README.md",
            "checkpoint",
            "pyproject.toml",
            "recipes",
            "test_two_words.py",
            "two_words.py",
        )
    ]
    words = (package / "README.md").read_text()
    assert f"# {kind}=two_words" in words and "--config-dir recipes recipe=two_words\n" in words
    for path in package.rglob("*.*"):
        text = path.read_text() if path.is_file() else ""
        assert "{{" not in text and "{%" not in text and "NAME" not in text
        assert not [line for line in text.split("\n") if len(line) > 140]
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    place = project["entry-points"][f"rlinf_vla.{kind}s"]["two_words"]
    assert (
        place.startswith("two_words:")
        and f"{place.partition(':')[2]}" in (package / "two_words.py").read_text()
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "rlinf-vla new {model|env|reward|robot|algorithm} NAME"),
        (("env",), "rlinf-vla new {model|env|reward|robot|algorithm} NAME"),
        (("envs", "mine"), "did you mean env?"),
        (("env", "a", "b"), "a kind and a name"),
        (("env", "my-env"), "lower-case letters, digits and underscores"),
        (("env", "MyEnv"), "lower-case letters, digits and underscores"),
        (("env", "../mine"), "lower-case letters, digits and underscores"),
        (("env", "class"), "lower-case letters, digits and underscores"),
        (("model", "pi0"), "model=pi0 is installed already"),
        (("model", "none"), "model=none is installed already"),
        (("env", "robot"), "env=robot is installed already"),
        (("reward", "json"), "a Python module json is installed already"),
        (("reward", "torch"), "a Python module torch is installed already"),
        (("robot", "arm"), "the package has another Arm already, choose another name"),
        (("robot", "clock"), "the package has another Clock already"),
        (("env", "step"), "the package has another Step already"),
        (("env", "true"), "a class cannot be named after it"),
        (("env", "_1"), "a class cannot be named after it"),
        (("reward", "taken"), "taken exists already"),
    ],
)
def test_what_cannot_be_written_is_refused(
    rlinf_vla: CommandLine, tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    (tmp_path / "taken").mkdir()
    assert complaint in rlinf_vla("new", *words).complaint
    assert [path.name for path in tmp_path.iterdir()] == ["taken"], "nothing is written"
