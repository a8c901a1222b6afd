"""Tests of installation: the wheel is complete, and its requirements never replace an installed PyTorch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCES = (
    "rlinf_vla",
    "features",
    "benchmarks",
    "models",
    "envs",
    "rewards",
    "robots",
    "recipes",
    "assets",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout; without network."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--skip-dependency-check",
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=copy)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = (copy / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's tree, for PYTHONPATH."""
    tree = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(tree)
    return tree


def packaged(folder: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md"
    }


def test_the_wheel_is_complete(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in SOURCES:
        wanted = packaged(folder)
        missing = {
            name
            for name in wanted
            if (name if folder == "rlinf_vla" else f"rlinf_vla/{name}") not in names
        }
        assert wanted and not missing
    assert {
        "rlinf_vla/py.typed",
        "rlinf_vla/recipes/train.yaml",
        "rlinf_vla/assets/openvla_tiny/tokenizer.json",
    } <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"rlinf_vla"}, (
        "no generic name is installed in site-packages"
    )


def run_installed(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-m", "rlinf_vla.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=cwd,
        env=environment,
    )


def test_the_wheel_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = "import rlinf_vla, rlinf_vla.models.openvla; print(rlinf_vla.__file__, rlinf_vla.models.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    # the wheel's modules are imported, not those of an installed checkout
    found = subprocess.run(
        [sys.executable, "-c", where],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env=environment,
    )
    assert found.stdout.count(str(installed)) == 2, found.stdout + found.stderr
    shown = run_installed(installed, "train", "recipe=maniskill_ppo", "--cfg", "job", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "name: maniskill_ppo" in shown.stdout and "checkpoint: asset://" in shown.stdout
    assert list(tmp_path.iterdir()) == [], "--cfg job writes nothing"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_written_packages_pass_their_tests_in_a_fresh_environment(
    wheel: Path, tmp_path: Path
) -> None:
    """All five kinds, by the commands of their README. Third-party packages are those of this environment."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    own = Path(
        sysconfig.get_path(
            "purelib", vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
        )
    )
    # an editable checkout there is not on the path, because no .pth file is read in a folder that one names
    (own / "third_party.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("PYTEST")
    }
    environment |= {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "TMPDIR": str(tmp_path),
        "RAY_TMPDIR": tempfile.gettempdir(),  # its sockets have short paths
    }

    def command(*words: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=500, cwd=cwd, env=environment
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    pip = (
        "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--disable-pip-version-check",
    )
    command(
        "python", "-m", "pip", "uninstall", "-q", "-y", "setuptools"
    )  # venv's own is too old, that of this environment is not
    command(*pip, str(wheel))
    where = command("python", "-c", "import rlinf_vla; print(rlinf_vla.__file__)")
    assert where.startswith(str(own)), "the wheel's modules are imported, not those of a checkout"
    for kind in ("model", "env", "reward", "robot", "algorithm"):
        package = tmp_path / f"own_{kind}"
        command("rlinf-vla", "new", kind, package.name)
        install, test, train = (
            (package / "README.md").read_text().split("```")[1].strip().split("\n")
        )
        assert install == 'pip install -e ".[test]"'
        command(*pip, "-e", ".", cwd=package)
        assert re.search(r"\d+ passed", command(*test.split(), "-p", "no:randomly", cwd=package))
        command(*train.split(), "iterations=1", "episodes=2", "run_dir=run", cwd=package)
        assert (package / "run" / "checkpoints" / "step_000001" / "COMPLETE").exists()


# requirements that make pip replace a CPU build by a CUDA build, or install a torchvision that breaks transformers


def test_the_installed_torch_fits_this_machine() -> None:
    assert torch.version.cuda is None or torch.cuda.is_available()


def test_torchvision_is_absent_or_fits() -> None:
    if importlib.util.find_spec("torchvision"):
        code = "import torchvision; from transformers import LlamaForCausalLM"
        assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


def test_torch_is_bounded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (request,) = [each for each in project["dependencies"] if re.match(r"torch\b", each)]
    assert request.endswith("<2.14")
    pinned = re.search(r"^torch==(2\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and float(pinned[1].removeprefix("2.")) < 14, (
        "the version that CI installs is within the bound"
    )
    extras = project["optional-dependencies"]
    others = [extras[name] for name in extras if name != "timm"]
    assert not [
        requirement
        for requirement in chain(project["dependencies"], *others)
        if re.match(r"(torchvision|timm|.*\btimm\b)", requirement)
    ], "timm installs a torchvision, so it is in no other extra"


def test_the_entry_points_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = [
        *project["scripts"].values(),
        *(target for group in project["entry-points"].values() for target in group.values()),
    ]
    for target in targets:
        EntryPoint("any", target, "any").load()


def test_other_extras_are_installed_into_an_existing_environment(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)

    def would_do(extras: str) -> str:
        make = ["make", "--dry-run", "install", f"EXTRAS={extras}", "VENV=.venv", "FIND_LINKS="]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MAKE")
        }  # these tests run under make, too
        return subprocess.run(
            make,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    (tmp_path / ".venv").mkdir()
    for extras in ("maniskill,ray,dev", "libero,dev"):
        said = would_do(extras)
        assert f'-e ".[{extras}]"' in said
        stamp = said.splitlines()[-1].removeprefix("touch ")
        (tmp_path / stamp).touch()
        assert "uv pip install" not in would_do(extras), "a second install does nothing"


def test_the_dockerfile_names_existing_extras_and_all_system_libraries() -> None:
    from rlinf_vla.envs.maniskill.vulkan import LIBRARIES

    text = (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert len(named) == 2 and {*",".join(named).split(",")} <= {*extras}
    assert {*LIBRARIES} <= {*text.split()}
