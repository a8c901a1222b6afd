"""The shape of the repository that docs and reviews rely on: who imports whom, how long a module is, what code must never do."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHELVES = ("models", "envs", "rewards", "robots")
DATA = ("recipes", "assets")
PAGES = {"types", "child_process", "trust", "robot", "rotations", "protocols", "atomic", "places", "pictures", "ranges"}
"""What a shelf may use of the engine."""

ALGORITHMS = PAGES | {"algorithms"}
SIBLINGS = {"rollout", "training", "evaluation", "telemetry", "datasets"}
MAY_IMPORT = {
    "types": set(),
    "atomic": set(),
    "places": set(),
    "child_process": set(),
    "trust": set(),
    "pictures": set(),
    "robot": set(),
    "rotations": set(),
    "ranges": {"types"},
    "protocols": {"types"},
    "algorithms": PAGES,
    "datasets": PAGES,
    "rollout": ALGORITHMS | {"datasets"},
    "training": ALGORITHMS,
    "evaluation": ALGORITHMS | {"rollout"},
    "telemetry": {"types", "atomic"},
    "flow": ALGORITHMS | SIBLINGS,
    "plugins": PAGES,
    "recipe": ALGORITHMS | SIBLINGS | {"flow", "plugins"},
    "compose": {"recipe", "plugins", "types"},
    "commands": ALGORITHMS | SIBLINGS | {"flow", "recipe", "plugins", "compose"},
    "cli": {"child_process", "commands", "compose", "plugins", "robot", "trust", "types"},
}
"""commands -> flow -> {rollout, training, evaluation, telemetry} -> {algorithms, datasets} -> {protocols, types}, and never back up."""


def modules(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


ENGINE = [path for path in modules("rlinf_vla") if path.parent != ROOT / "rlinf_vla" or path.name != "__init__.py"]
SHELF = modules(*SHELVES)
SHIPPED = modules("rlinf_vla", *SHELVES, *DATA)


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths])


def imported(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports, at its top or inside its functions."""
    package = path.relative_to(ROOT).parent.parts
    if package[0] in SHELVES:
        package = ("rlinf_vla", *package)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += (node.module or "").split(".") if node.module else []
            if base == ["rlinf_vla"]:
                yield from (f"rlinf_vla.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
            else:
                yield ".".join(base)


def rooms(path: Path) -> set[str]:
    """The parts of the project that a module imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("rlinf_vla.")}


def room(path: Path) -> str:
    return path.relative_to(ROOT / "rlinf_vla").parts[0].removesuffix(".py")


def test_every_room_has_its_place() -> None:
    assert {room(path) for path in ENGINE} == MAY_IMPORT.keys()


@each(ENGINE)
def test_imports_go_down(path: Path) -> None:
    allowed = MAY_IMPORT[room(path)] | {room(path)}
    assert rooms(path) <= allowed, f"{room(path)} may import {sorted(allowed)}"


@each(SHELF)
def test_a_shelf_knows_the_engines_first_pages_only(path: Path) -> None:
    shelf = path.relative_to(ROOT).parts[0]
    assert rooms(path) <= PAGES | {shelf}
    absolute = {name for node in ast.walk(ast.parse(path.read_text())) for name in absolute_names(node)}
    assert not any(name.startswith(tuple(f"rlinf_vla.{each}" for each in SHELVES)) for name in absolute), "siblings are imported relatively"


def absolute_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@each(SHELF)
def test_models_and_simulators_do_not_know_each_other(path: Path) -> None:
    others = {f"rlinf_vla.{shelf}" for shelf in SHELVES if shelf != path.relative_to(ROOT).parts[0]}
    assert not any(name.startswith(tuple(others)) for name in imported(path))


@each(SHIPPED)
def test_a_module_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 300


@each(SHIPPED)
def test_nothing_runs_what_it_reads(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not {name.split(".")[0] for name in imported(path)} & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            check_call(node)


WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today", "time.localtime", "time.gmtime"}
AT_THE_ROBOT = [
    *modules("robots"),
    *(path for path in modules("rlinf_vla/rollout", "rlinf_vla/commands", "rlinf_vla/flow") if path.stem.startswith(("robot", "control"))),
    *(ROOT / "rlinf_vla" / name for name in ("rollout/clock.py", "rollout/background.py", "rollout/chunks.py", "rollout/sensing.py")),
    *(ROOT / "rlinf_vla" / name for name in ("commands/online.py", "flow/online.py")),
]


DIARY = ROOT / "robots" / "folder.py"


def looks_at_the_wall_clock(path: Path) -> bool:
    calls = (ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(name.endswith(tuple(WALL_CLOCK)) for name in calls)


@each([path for path in AT_THE_ROBOT if path != DIARY])
def test_nothing_at_a_robot_looks_at_the_wall_clock(path: Path) -> None:
    """Somebody may set it at any moment."""
    assert not looks_at_the_wall_clock(path)


def test_only_a_robots_diary_says_what_time_it_was() -> None:
    assert looks_at_the_wall_clock(DIARY)


def check_call(node: ast.Call) -> None:
    name = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    assert "trust_remote_code" not in given
    assert given.get("shell", "False") == "False"
    assert name not in {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
    if name == "torch.load":
        assert given.get("weights_only") == "True"
    if name.rsplit(".", 1)[-1] == "load" and name.startswith(("np.", "numpy.")):
        assert given.get("allow_pickle", "False") == "False"


def test_the_checks_see_what_they_forbid() -> None:
    for code in (
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "subprocess.run(x, shell=True)",
        "np.load(x, allow_pickle=True)",
        "eval(x)",
    ):
        (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
        with pytest.raises(AssertionError):
            check_call(call)


@each([path for path in SHIPPED if path != ROOT / "rlinf_vla" / "child_process.py"])
def test_one_module_makes_the_command_lines_of_python_processes(path: Path) -> None:
    """Which leave out the current directory."""
    tree = ast.parse(path.read_text())
    assert "sys.executable" not in {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


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
            assert (module.parent / "__init__.py").exists(), f"{module} is in no package ({package})"


def test_every_test_folder_is_a_room() -> None:
    """tests/ mirrors the tree."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    rooms_of_code = {path.name for path in (ROOT / "rlinf_vla").iterdir() if path.is_dir()} | {*SHELVES, "conformance", "parity"}
    assert folders <= rooms_of_code
