"""The proof kit for GPUs, rehearsed on the CPU with tiny models: no time is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KIT = ROOT / "tools" / "prove_gpu.py"


def prove(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(KIT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, **options)  # type: ignore[call-overload]


def rehearse(folder: Path, *parts: str, limit: int = 240) -> tuple[subprocess.CompletedProcess[str], str]:
    found = prove(
        "--device", "cpu", "--size", "tiny", f"--limit={limit}", f"--results={folder}/results", f"--page={folder}/page.md", *parts
    )
    return found, (folder / "page.md").read_text()


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    found = prove(f"--results={tmp_path}/results", f"--page={page}")
    assert found.returncode == 2 and found.stderr.count("\n") == 1 and "PyTorch sees no CUDA device here" in found.stderr
    assert "It has not run on a GPU yet: nothing here is proven." in page.read_text()
    assert (ROOT / "docs" / "results" / "gpu.md").read_text() == page.read_text() or "cuda" in (ROOT / "docs/results/gpu.md").read_text()


def test_parts_are_kept_and_a_failure_does_not_end_the_others(tmp_path: Path) -> None:
    """The first part has no time; then another runs, and the page shows both. A run on the CPU proves nothing."""
    found, page = rehearse(tmp_path, "update", limit=1)
    assert found.returncode == 1 and "**ended after 1 s**" in page
    found, page = rehearse(tmp_path, "memory")
    assert found.returncode == 0, found.stdout + (tmp_path / "results" / "memory.log").read_text()
    assert "**ended after 1 s**" in page and "counted: 0.0" in page and "nothing here is proven" in page
    document = json.loads((tmp_path / "results" / "memory.json").read_text())
    assert (document["status"], document["device"], document["size"]) == ("done", "cpu", "tiny") and len(document["rows"]) == 3
    found, page = rehearse(tmp_path, "finetune")
    assert "tensors changed, all finite" in page, (tmp_path / "results" / "finetune.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["conformance", "rehearsal", "capture", "openvla", "oft", "pi0", "pi05", "update"])
def test_every_part_runs(tmp_path: Path, part: str) -> None:
    found, page = rehearse(tmp_path, part)
    assert found.returncode == 0, found.stdout + (tmp_path / "results" / f"{part}.log").read_text()
    assert f"PARTS={part}`: **done**" in page and "other bits" not in page


def test_without_installation_the_plug_ins_are_found(tmp_path: Path) -> None:
    """An interpreter that does not see where this package is installed."""
    say = "from rlinf_vla.core import plugins; print([sorted(each()) for each in (plugins.models, plugins.envs)])"
    script = f"""
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from importlib import metadata
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
sys.path.insert(0, {str(KIT.parent)!r})
from pathlib import Path
import prove_gpu
prove_gpu.make_importable(Path({str(tmp_path)!r}))
print([point.name for point in metadata.entry_points(group="rlinf_vla.models")])
import rlinf_vla.recipes, rlinf_vla.robots.franka, rlinf_vla.config.recipe
print(rlinf_vla.recipes.__file__)
"""
    found = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    names, place = found.stdout.splitlines()
    assert names == "['compact', 'openvla', 'openvla_oft', 'pi0']" and place.startswith(str(tmp_path)), say


def test_a_part_whose_packages_are_missing_is_left_out(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(KIT.parent)!r})
import prove_gpu
prove_gpu.PARTS = {{"memory": ("Memory", ("torch", "no_such_package", "json_of_tomorrow"))}}
sys.exit(prove_gpu.main(["--device=cpu", "--size=tiny", "--results={tmp_path}/results", "--page={tmp_path}/page.md"]))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and found.stdout.startswith("memory: not run: no_such_package, json_of_tomorrow missing\n"), found.stderr
    assert "**not run: no_such_package, json_of_tomorrow missing**" in (tmp_path / "page.md").read_text()
