"""The simulated SO-101 for tests: LeRobot's driver in its own environment, at simulated motors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_vla.robots.lerobot.config import SO101SimConfig
from tests.skips import NOT_INSTALLED

LEROBOT = Path(__file__).parents[2] / ".venv-lerobot" / "bin" / "python"
WITHOUT_LEROBOT = "needs `make lerobot`"


def require_twin() -> None:
    """Skip the module of a test without MuJoCo or LeRobot."""
    pytest.importorskip("mujoco", reason=NOT_INSTALLED + "franka")
    if not LEROBOT.exists():
        pytest.skip(WITHOUT_LEROBOT, allow_module_level=True)


def twin(folder: Path, **options: object) -> SO101SimConfig:
    return SO101SimConfig(folder=str(folder), python=str(LEROBOT), **options)  # type: ignore[arg-type]
