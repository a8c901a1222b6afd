"""Structure of the repository: imports between modules, size of rooms, forbidden code."""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import (
    DATA,
    FEATURES,
    FOR_PLUGINS,
    FOR_SOME,
    MAY_IMPORT,
    PLUGIN_PACKAGES,
    ROOT,
    absolute_names,
    import_pairs,
    imported,
    modules,
    name_of,
    nodes,
    package_of,
    room,
    rooms,
    text,
)
from tools.sizes import statements

ENGINE = [path for path in modules("rlinf_vla") if path != ROOT / "rlinf_vla" / "__init__.py"]
BESIDE = [path for path in modules("features") if path != ROOT / "features" / "__init__.py"]
PLUGIN_MODULES = modules(*PLUGIN_PACKAGES)
SHIPPED = modules("rlinf_vla", "features", "benchmarks", *PLUGIN_PACKAGES, *DATA)
READ = [*SHIPPED, *modules("tools", "studies")]


def offenders(paths: Iterable[Path], faults: Callable[[Path], Iterable[object]]) -> list[str]:
    """One line for each fault that ``faults`` finds in a file."""
    return [f"{name_of(path)}: {fault}" for path in paths for fault in faults(path)]


def imports_of_files() -> dict[str, set[str]]:
    """Module name to the modules of the project that it imports, wherever in the file."""
    files = [*ENGINE, *BESIDE, *PLUGIN_MODULES, *modules("benchmarks")]
    names = {
        ".".join((*package_of(path), path.stem)).removesuffix(".__init__"): path for path in files
    }
    found = {}
    for name, path in names.items():
        pairs = import_pairs(path)
        said = {f"{base}.{each}" if f"{base}.{each}" in names else base for base, each in pairs}
        found[name] = (said & names.keys()) - {name}
    return found


def test_no_two_files_import_each_other() -> None:
    """Directly or through other files, lazily or not, packages and plug-ins included."""
    imports = imports_of_files()
    assert "rlinf_vla.config.errors" in imports["rlinf_vla.core.io"]
    assert "rlinf_vla.models.openvla.cache" in imports["rlinf_vla.models.openvla.decoding"]
    order = graphlib.TopologicalSorter(imports)
    assert list(order.static_order())


def test_every_room_is_in_the_import_order() -> None:
    assert {room(path) for path in BESIDE} == set(FEATURES)
    assert {room(path) for path in (*ENGINE, *BESIDE)} == MAY_IMPORT.keys()
    seen = set[str]().union(*(below for each, below in MAY_IMPORT.items() if each not in FEATURES))
    assert seen & set(FEATURES) == {"realworld"}, (
        "the suite for robots, and no other part of the trainer"
    )


def test_imports_go_down() -> None:
    def faults(path: Path) -> Iterator[str]:
        allowed = MAY_IMPORT[room(path)] | {room(path)}
        if not rooms(path) <= allowed:
            yield f"imports {sorted(rooms(path) - allowed)}; {room(path)} may import {sorted(allowed)}"

    assert offenders([*ENGINE, *BESIDE], faults) == []


def test_a_plugin_imports_only_what_plugins_may() -> None:
    def faults(path: Path) -> Iterator[str]:
        package = path.relative_to(ROOT).parts[0]
        yield from rooms(path) - FOR_PLUGINS - FOR_SOME.get(package, set()) - {package}
        siblings = tuple(f"rlinf_vla.{each}" for each in PLUGIN_PACKAGES)
        yield from (
            f"{name}: siblings are imported relatively"
            for name in absolute_names(path)
            if name.startswith(siblings)
        )

    assert offenders(PLUGIN_MODULES, faults) == []


def test_only_testing_needs_pytest() -> None:
    def faults(path: Path) -> list[str]:
        return [
            name
            for name in imported(path)
            if name.partition(".")[0] == "pytest" or name.startswith("rlinf_vla.testing")
        ]

    assert (
        offenders(
            (path for path in SHIPPED if ROOT / "rlinf_vla" / "testing" not in path.parents), faults
        )
        == []
    )


def test_models_and_simulators_do_not_know_each_other() -> None:
    def faults(path: Path) -> list[str]:
        others = tuple(
            f"rlinf_vla.{package}"
            for package in PLUGIN_PACKAGES
            if package != path.relative_to(ROOT).parts[0]
        )
        return [name for name in imported(path) if name.startswith(others)]

    assert offenders(PLUGIN_MODULES, faults) == []


def prose(path: Path) -> Iterator[int]:
    """Numbers of the lines of docstrings and of comments that stand alone."""
    for node in nodes(path):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
    for token in tokenize.generate_tokens(io.StringIO(text(path)).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            yield token.start[0]


def test_prose_is_at_most_100_characters_wide() -> None:
    def faults(path: Path) -> list[str]:
        lines = text(path).split("\n")
        return [
            f"line {number}" for number in sorted(set(prose(path))) if len(lines[number - 1]) > 100
        ]

    assert offenders(READ, faults) == []


MAIN_JOB = """
import sys
from rlinf_vla.cli.main import run
assert run(["train", "recipe=maniskill_ppo", "--cfg", "job"]) == 0
import rlinf_vla.cli.train, rlinf_vla.runtime.on_policy
print("LOADED", *(name for name, module in sys.modules.items() if name.startswith("rlinf_vla") and getattr(module, "__file__", None)))
assert "jinja2" not in sys.modules, "only a report needs it"
"""


def test_the_main_job_imports_no_feature_and_no_other_plugin() -> None:
    """A budget of the modules that `rlinf-vla train recipe=maniskill_ppo` imports."""
    said = subprocess.run(
        [sys.executable, "-c", MAIN_JOB], capture_output=True, text=True, check=True
    ).stdout
    loaded = said.rpartition("LOADED ")[2].split()
    others = (
        "features",
        "robots",
        "benchmarks",
        "envs.libero",
        "envs.genesis",
        "envs.newton",
        "models.pi0",
        "models.smolvla",
        "models.gr00t",
        "models.compact",
    )
    assert [
        name for name in loaded if name.startswith(tuple(f"rlinf_vla.{each}" for each in others))
    ] == []
    assert len(loaded) <= 110


BUDGETS = {
    "rlinf_vla/algorithms": 1_700,
    "rlinf_vla/cli": 1_790,
    "rlinf_vla/config": 640,
    "rlinf_vla/core": 1_300,
    "rlinf_vla/data": 1_240,
    "rlinf_vla/evaluation": 300,
    "rlinf_vla/rollout": 1_290,
    "rlinf_vla/runtime": 3_880,
    "rlinf_vla/telemetry": 1_270,
    "rlinf_vla/testing": 1_530,
    "rlinf_vla/training": 1_270,
    "features/planner": 2_930,
    "features/realworld": 2_800,
    "features/serving": 1_860,
    "features/sweeps": 1_330,
    "features/view": 390,
    "models": 4_320,
    "envs": 5_990,
    "robots": 4_710,
    "rewards": 60,
    "benchmarks": 1_910,
}
"""Statements of a room: what it can do, however its lines are laid out. A change that needs more saves
statements elsewhere in the room, or raises the budget with a reason in CHANGELOG.md."""


@pytest.mark.parametrize("folder", list(BUDGETS))
def test_a_room_keeps_within_its_statements(folder: str) -> None:
    assert sum(statements(nodes(path)) for path in modules(folder)) <= BUDGETS[folder]


def test_every_room_has_a_budget() -> None:
    assert {Path(each).name for each in BUDGETS if "/" in each} == MAY_IMPORT.keys()


EXECUTES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Modules that run code which is hidden in data."""


def test_no_code_executes_data() -> None:
    def faults(path: Path) -> Iterator[str]:
        yield from {name.split(".")[0] for name in imported(path)} & EXECUTES
        yield from (
            f"line {node.lineno}: {ast.unparse(node)}"
            for node in nodes(path)
            if isinstance(node, ast.Call) and executes(node)
        )

    assert offenders(SHIPPED, faults) == []


WALL_CLOCK = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "date.today",
    "time.localtime",
    "time.gmtime",
}
AT_THE_ROBOT = modules("robots", "features/realworld")
JOURNAL = ROOT / "robots" / "runtime_folder.py"


def looks_at_the_wall_clock(path: Path) -> bool:
    calls = (ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call))
    return any(name.endswith(tuple(WALL_CLOCK)) for name in calls)


def test_of_robot_code_only_the_journal_reads_the_wall_clock() -> None:
    """It may be set at any moment."""
    assert [path for path in AT_THE_ROBOT if looks_at_the_wall_clock(path)] == [JOURNAL]


def executes(node: ast.Call) -> bool:
    """Whether a call may run code that is in its argument's data."""
    name = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return (
        "trust_remote_code" in given
        or given.get("shell", "False") != "False"
        or name in {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
        or (name == "torch.load" and given.get("weights_only") != "True")
        or (
            name.startswith(("np.", "numpy."))
            and name.endswith(".load")
            and given.get("allow_pickle", "False") != "False"
        )
    )


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("torch.load(x)", True),
        ("torch.load(x, weights_only=False)", True),
        ("torch.load(x, weights_only=True)", False),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", True),
        ("subprocess.run(x, shell=True)", True),
        ("subprocess.run(x)", False),
        ("np.load(x, allow_pickle=True)", True),
        ("np.load(x)", False),
        ("eval(x)", True),
    ],
)
def test_a_call_that_executes_data_is_detected(code: str, refused: bool) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call) and executes(call) is refused


def test_one_module_builds_the_command_lines_of_python_processes() -> None:
    """They exclude the current directory from imports."""
    found = [
        path
        for path in SHIPPED
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
            for node in nodes(path)
        )
    ]
    assert found == [ROOT / "rlinf_vla" / "core" / "child_process.py"]


def test_the_listed_packages_are_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = setuptools["package-dir"]
    folders = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in places.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(setuptools["packages"]) == folders and len(setuptools["packages"]) == len(folders)
    for package, folder in places.items():
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), (
                f"{module} is in no package ({package})"
            )


def test_every_test_folder_is_a_room() -> None:
    """tests/ mirrors the tree."""

    def folders(parent: Path) -> set[str]:
        return {path.name for path in parent.iterdir() if path.is_dir() and any(path.glob("*.py"))}

    rooms_of_code = {path.name for path in (ROOT / "rlinf_vla").iterdir() if path.is_dir()} | {
        *PLUGIN_PACKAGES,
        "parity",
        "benchmarks",
    }
    assert folders(ROOT / "tests") <= rooms_of_code
    assert folders(ROOT / "tests" / "features") == set(FEATURES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(path: Path) -> set[str]:
    """Private names that a module defines: functions, classes, variables and attributes of ``self``."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            found.add(node.attr)
    return set(filter(is_private, found))


def used(node: ast.AST) -> Iterator[str]:
    """Names that one node reads or replaces in another object or module, by ``monkeypatch.setattr`` too."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlinf_vla"):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
        yield from (
            each.value.rpartition(".")[2]
            for each in node.args
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )


@functools.cache
def of_the_code() -> set[str]:
    return set().union(*map(defined, SHIPPED))


def privates(path: Path) -> set[str]:
    """Private names of the code that a test uses and does not define itself."""
    names = {name for node in nodes(path) for name in used(node)}
    return (names & of_the_code()) - defined(path) - FOREIGN


FOREIGN = {"_replace", "_model", "_handle_udp_command", "_initialize_episode"}
"""Not ours, though a class of ours has the same or overrides it: of NamedTuple, robosuite, franky-sim and ManiSkill."""


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports a file of a folder without ``__init__.py`` by its name alone."""
    files = [path for path in modules("tests") if path.name.startswith("test_")]
    names = [path.name for path in files if not (path.parent / "__init__.py").exists()]
    assert len(names) > 100
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_test_reads_nothing_private() -> None:
    assert offenders(modules("tests"), privates) == []


@pytest.mark.parametrize(
    "code",
    [
        "robot._record",
        "from rlinf_vla.robots.client import _record",
        "monkeypatch.setattr(robot, '_record', 0)",
        "monkeypatch.setattr('robot._record', 0)",
    ],
)
def test_a_private_name_is_detected(code: str, tmp_path: Path) -> None:
    foreign = tmp_path / "test_foreign.py"
    foreign.write_text(code)
    assert privates(foreign)
    own = tmp_path / "test_own.py"
    own.write_text(f"{code}\nclass Own:\n    def _record(self): ...")
    assert not privates(own)
