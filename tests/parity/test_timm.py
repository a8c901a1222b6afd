"""OpenVLA's vision towers, and the compact policy's encoder, with the real timm in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.models.openvla.vit import TIMM

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-timm"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    if not (FOLDER / "timm").exists():
        pytest.skip("needs `make timm`")
    program = Path(__file__).with_name("timm_towers.py")
    command = [sys.executable, str(program), str(FOLDER)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found: dict[str, Any] = json.loads(finished.stdout.rpartition("RESULT ")[2])
    return found


@pytest.mark.parametrize("name", list(TIMM))
def test_a_tower_has_the_features_of_timm(result: dict[str, Any], name: str) -> None:
    assert result["towers"][name] < 1e-12


def test_the_compact_policy_sees_by_a_backbone_of_timm(result: dict[str, Any]) -> None:
    encoder = result["encoder"]
    assert encoder["weights"] > 4e6 and encoder["shape"] == [2, 16]
    assert "timm has no model 'resnet11'" in encoder["refusal"]
