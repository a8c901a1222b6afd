"""Compare LIBERO in this Python environment with another one on the same states.

Writes a Markdown page and two images. ``make libero-reference`` runs:
python studies/libero_reference.py OTHER_PYTHON PAGE.md PICTURE_FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vla.core import bootstrap, child_process
from rlinf_vla.envs import mujoco_gl as gl
from rlinf_vla.envs.libero.plugin import files_of
from rlinf_vla.envs.libero.suites import LIMITS, of_suite

TASKS_PER_SUITE = 3
SHOWN = ("libero_object-0", "libero_spatial-0")


def snapshots(python: str | None) -> dict[str, Any]:
    """Arrays of ``libero_snapshots.py``, made by that Python interpreter."""
    every = [of_suite(suite, python) for suite in LIMITS]
    chosen = [
        tasks[number]
        for tasks in every
        for number in np.linspace(0, len(tasks) - 1, TASKS_PER_SUITE).astype(int)
    ]
    asked = json.dumps(
        [files_of(task) | {"name": task.name, "chunk": task.number == 0} for task in chosen]
    )  # of each suite's first
    environment = child_process.environment(gl.find("auto", python).environment())
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "snapshots.npz")
        command = child_process.command(
            [str(bootstrap.__file__), "studies.libero_snapshots", str(output)], python
        )
        subprocess.run(command, input=asked, text=True, env=environment, check=True)
        with np.load(output, allow_pickle=False) as stored:
            return dict(stored)


def page(here: dict[str, Any], there: dict[str, Any]) -> str:
    stacks = [json.loads(str(recording["stack"])) for recording in (here, there)]
    lines = ["| | here | reference |", "|---|---|---|"]
    lines += [
        f"| {name} | {stacks[0][name]} | {stacks[1][name]} |"
        for name in ("python", "mujoco", "robosuite", "numpy")
    ]
    lines += [
        "",
        "| suite | camera | mean abs difference (of 255) | mean brightness here | reference | max difference in qpos |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for suite in LIMITS:
        for camera in ("base", "wrist"):
            names = [
                name for name in here if name.startswith(f"{suite}-") and name.endswith(camera)
            ]
            pairs = [(here[name].astype(float), there[name].astype(float)) for name in names]
            difference = np.mean([np.abs(a - b).mean() for a, b in pairs])
            bright = [np.mean([pair[side].mean() for pair in pairs]) for side in (0, 1)]
            states = [name.rsplit("/", 1)[0] + "/qpos" for name in names]
            moved = max(np.abs(here[name] - there[name]).max() for name in states)
            lines.append(
                f"| {suite} | {camera} | {difference:.2f} | {bright[0]:.1f} | {bright[1]:.1f} | {moved:.1e} |"
            )
    tasks = [name for name in here if name.endswith("lazy_is_exact")]
    same = [
        "yes" if all(bool(recording[name]) for name in tasks) else "NO"
        for recording in (here, there)
    ]
    lines += [
        "",
        f"env.rendering=lazy after a chunk of 8 random actions, two cameras, {len(tasks)} tasks: bit-equal to exact here: {same[0]};",
    ]
    lines += [f"on the reference: {same[1]}."]
    return "\n".join(lines) + "\n"


def side_by_side(name: str, here: dict[str, Any], there: dict[str, Any]) -> Image.Image:
    """Image of here, the reference, and ten times their difference, side by side."""
    a, b = here[f"{name}/base"], there[f"{name}/base"]
    difference = np.clip(10 * np.abs(a.astype(int) - b), 0, 255).astype(np.uint8)
    return Image.fromarray(np.concatenate([a, b, difference], axis=1)).quantize(256)


def main(python: str, output: Path, pictures: Path) -> None:
    here = snapshots(None)
    there = snapshots(python)
    text = page(here, there)
    for name in SHOWN:
        picture = pictures / f"libero_reference_{name.rsplit('-', 1)[0]}.png"
        side_by_side(name, here, there).save(picture, optimize=True)
        text += f"\n{name}: here, the reference, ten times their difference.\n\n![]({os.path.relpath(picture, output.parent)})\n"
    output.write_text(
        f"# LIBERO here and on the reference stack\n\n`make libero-reference` wrote this page.\n\n{text}"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
