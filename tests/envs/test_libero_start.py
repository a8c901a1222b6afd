"""LIBERO's first observation under published waiting protocols, as recorded by others.

The recordings lie beside the checkout; LIBERO_RECORDINGS names another folder of the same layout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rlinf_vla.core.types import Episodes
from rlinf_vla.envs.libero.config import LiberoConfig
from rlinf_vla.envs.libero.plugin import plugin
from tests.skips import needs

FOLDER = Path(
    os.environ.get("LIBERO_RECORDINGS") or Path(__file__).parents[3] / "shared" / "libero_start"
).absolute()
RECORDED: list[dict[str, Any]] = (
    json.loads((FOLDER / "start_states.json").read_text()) if FOLDER.is_dir() else []
)
CASES = sorted({(row["suite"], row["wait_steps"], row["wait_gripper"]) for row in RECORDED})

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.slow,
    needs("libero"),
    pytest.mark.skipif(not RECORDED, reason="no recordings of LIBERO's starts beside the checkout"),
]


@pytest.mark.parametrize(
    ("suite", "steps", "gripper"),
    [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.nightly) for case in CASES],
)
def test_the_first_observation_is_the_recorded_one(suite: str, steps: int, gripper: float) -> None:
    rows = [
        row
        for row in RECORDED
        if (row["suite"], row["wait_steps"], row["wait_gripper"]) == (suite, steps, gripper)
    ]
    tasks = sorted({row["task"] for row in rows})
    (env,) = plugin.create(
        LiberoConfig(
            suite=suite,
            tasks=tasks,
            num_envs=len(rows),
            processes=1,
            scenes=len(tasks),
            convention="openvla",
            cameras=["base", "wrist"],
            wait_steps=steps,
            wait_gripper="open" if gripper == -1 else "hold",
            init_states="official",
        ),
        1,
    )
    try:
        task_ids = torch.tensor([tasks.index(row["task"]) for row in rows])
        seen = env.reset(
            Episodes.first_attempts(task_ids, torch.tensor([row["init_state"] for row in rows]))
        )
        for number, row in enumerate(rows):
            assert seen.state[number].tolist() == pytest.approx(row["state8"], abs=1e-4), row["key"]
            for camera, images in seen.images.items():
                with Image.open(FOLDER / f"{row['key']}_{camera}.png") as picture:
                    difference = np.abs(
                        np.asarray(picture.convert("RGB"), int) - images[number].cpu().numpy()
                    )
                assert difference.mean() < 0.05, (row["key"], camera)
    finally:
        env.close()
