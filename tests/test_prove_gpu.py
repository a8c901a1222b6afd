"""The proof kit for GPUs, rehearsed on the CPU with tiny models: no time is compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import needs

ROOT = Path(__file__).parents[1]
KIT = ROOT / "studies" / "prove_gpu.py"


NOT_INSTALLED = {"PYTHONPATH": next(entry for entry in sys.path if entry.endswith("site-packages"))}
"""For the interpreter below a virtual environment: the packages, but no editable installation of this one."""


def prove(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **NOT_INSTALLED} if python != sys.executable else None
    return subprocess.run(
        [python, str(KIT), *arguments], capture_output=True, text=True, timeout=280, env=environment
    )


def rehearse(
    folder: Path, *parts: str, limit: int = 240, **options: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    files = (f"--results={folder}/results", f"--page={folder}/page.md")
    found = prove(
        "--device", "cpu", "--size", "tiny", f"--limit={limit}", *files, *parts, **options
    )
    return found, (folder / "page.md").read_text()


def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    found = prove(f"--results={tmp_path}/results", f"--page={tmp_path}/page.md")
    assert (
        found.returncode == 2
        and found.stderr.count("\n") == 1
        and "PyTorch sees no CUDA device here" in found.stderr
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_parts_are_kept_and_a_failure_does_not_end_the_others(tmp_path: Path) -> None:
    """The first part has no time; then another runs, and the page shows both. A run on the CPU proves nothing."""
    found, page = rehearse(tmp_path, "update", limit=1)
    assert found.returncode == 1 and "**ended after 1 s**" in page
    found, page = rehearse(tmp_path, "finetune")
    assert found.returncode == 0, found.stdout + (tmp_path / "results" / "finetune.log").read_text()
    assert (
        "**ended after 1 s**" in page
        and "tensors changed, all finite" in page
        and "nothing here is proven" in page
    )
    document = json.loads((tmp_path / "results" / "finetune.json").read_text())
    assert (document["status"], document["device"], document["size"]) == (
        "done",
        "cpu",
        "tiny",
    ) and len(document["rows"]) == 2


GENESIS = pytest.param("genesis", marks=(needs("genesis"), pytest.mark.genesis))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "part",
    [
        "conformance",
        "rehearsal",
        "capture",
        "profiles",
        "openvla",
        "oft",
        "pi0",
        "pi05",
        "update",
        pytest.param("rendering", marks=needs("libero")),
        "rates",
        "merging",
        "simulators",
        "workers",
        "maniskill",
        "large",
        GENESIS,
    ],
)
def test_every_part_runs(tmp_path: Path, part: str) -> None:
    found, page = rehearse(tmp_path, part)
    assert found.returncode == 0, found.stdout + (tmp_path / "results" / f"{part}.log").read_text()
    assert f"PARTS={part}`: **done**" in page and "other bits" not in page


@pytest.mark.slow
def test_it_needs_no_installation(tmp_path: Path) -> None:
    found, page = rehearse(tmp_path, "memory", python=str(Path(sys.executable).resolve()))
    assert found.returncode == 0 and "counted: 0.0" in page, (
        found.stdout + (tmp_path / "results" / "memory.log").read_text()
    )
    links = tmp_path / "links" / "rlinf_vla"
    assert (links / "models").resolve() == ROOT / "models" and (
        links / "core"
    ).resolve() == ROOT / "rlinf_vla" / "core"
    assert (
        "compact = rlinf_vla.models.compact.policy:CompactPolicy"
        in (links.parent / "rlinf_vla-0.dist-info/entry_points.txt").read_text()
    )


def test_a_part_whose_packages_are_missing_is_left_out(tmp_path: Path) -> None:
    """The page is beside the results: that of this project is written only where it is named."""
    before = (ROOT / "docs" / "results" / "gpu.md").read_text()
    script = f"""
import sys
sys.path.insert(0, {str(KIT.parent)!r})
import prove_gpu
prove_gpu.PARTS = {{"memory": ("Memory", ("torch", "no_such_package", "json_of_tomorrow"))}}
sys.exit(prove_gpu.main(["--device=cpu", "--size=tiny", "--results={tmp_path}/results"]))
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and found.stdout.startswith(
        "memory: not run: no_such_package, json_of_tomorrow missing\n"
    ), found.stderr
    assert (
        "**not run: no_such_package, json_of_tomorrow missing**"
        in (tmp_path / "gpu.md").read_text()
    )
    assert (ROOT / "docs" / "results" / "gpu.md").read_text() == before
