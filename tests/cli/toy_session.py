"""The command line at the toy robot, in real time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import toy_robot


@pytest.fixture(name="toy")
def toy_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toy_robot.Arguments:
    """Arguments of a command line for a recipe at the toy robot, which child processes find, too."""
    toy_robot.announce(tmp_path / "package")
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "toy_rlpd.yaml").write_text(toy_robot.RECIPE.format(folder=tmp_path))
    (tmp_path / "model").mkdir()
    config = {
        "image_sizes": [16, 16],
        "chunk": 1,
        "action_dim": 4,
        "state_dim": 8,
        "patch": 4,
        "channels": [4],
        "width": 8,
    }
    config["state_range"] = {"low": [-1] * 8, "high": [1] * 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def arguments(verb: str, *overrides: str) -> list[str]:
        return [
            verb,
            "--config-dir",
            str(tmp_path),
            "recipe=toy_rlpd",
            "cluster=laptop",
            f"robot.fault={tmp_path}/fault",
            *overrides,
        ]

    return arguments
