"""The robot conformance suite on one simulated SO-101 and on two, driven by LeRobot."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_vla.robots.lerobot.config import BiSO101SimConfig, SO101SimConfig
from rlinf_vla.robots.lerobot.plugin import bi_so101_sim, so101_sim
from rlinf_vla.testing.robot import RobotConformance
from tests.robots.so101 import LEROBOT, require_twin, twin

require_twin()
pytestmark = [pytest.mark.simulator, pytest.mark.realtime, pytest.mark.nightly]


class TestSO101(RobotConformance):
    plugin = so101_sim
    wrong_configs = (
        {"cell": "nowhere.yaml"},
        {"cell": "cell://franka_sim"},
        {"python": "/nowhere/python"},
    )

    @pytest.fixture
    def config(self, tmp_path: Path) -> SO101SimConfig:
        return twin(tmp_path, cameras=["front", "wrist"])


class TestTwoSO101(RobotConformance):
    """Three cameras, and LeRobot's bimanual robot."""

    plugin = bi_so101_sim
    wrong_configs = ({"cell": "cell://so101_sim"},)

    @pytest.fixture
    def config(self, tmp_path: Path) -> BiSO101SimConfig:
        return BiSO101SimConfig(folder=str(tmp_path), python=str(LEROBOT))
