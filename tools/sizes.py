"""Print the lines and files of each package, and what the main job imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = sorted(path for path in (ROOT / "rlinf_vla").iterdir() if path.is_dir() and path.name != "__pycache__")
MAIN_JOB = """
import sys
from rlinf_vla.cli.main import run
assert run(["train", "recipe=maniskill_ppo", "--cfg", "job"]) == 0
import rlinf_vla.cli.train, rlinf_vla.runtime.local
print("LOADED", *(m.__file__ for n, m in sys.modules.items() if n.startswith("rlinf_vla") and getattr(m, "__file__", None)))
"""


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def show(name: str, paths: list[Path]) -> None:
    print(f"{name:28} {lines(paths):6} lines {len(paths):4} files")


def main() -> None:
    for folder in [*ENGINE, *(ROOT / name for name in ("models", "envs", "robots", "rewards", "benchmarks", "tools", "tests"))]:
        show(str(folder.relative_to(ROOT)), list(folder.rglob("*.py")))
    engine = list((ROOT / "rlinf_vla").rglob("*.py"))
    show("rlinf_vla without testing", [path for path in engine if "testing" not in path.parts])
    said = subprocess.run([sys.executable, "-c", MAIN_JOB], capture_output=True, text=True, check=True).stdout
    loaded = [Path(name) for name in said.rpartition("LOADED ")[2].split()]
    show("loaded by maniskill_ppo", loaded)
    show("  of these the engine's", [path for path in loaded if ROOT / "rlinf_vla" in path.parents])


if __name__ == "__main__":
    main()
