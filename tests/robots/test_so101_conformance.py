"""The robot conformance suite on the simulated SO-101, driven by LeRobot."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_vla.robots.lerobot.config import SO101SimConfig
from rlinf_vla.robots.lerobot.plugin import so101_sim
from rlinf_vla.testing.robot import RobotConformance
from tests.robots.so101 import require_twin, twin

require_twin()
pytestmark = [pytest.mark.simulator, pytest.mark.realtime]


class TestSO101(RobotConformance):
    plugin = so101_sim
    wrong_configs = ({"cell": "nowhere.yaml"}, {"cell": "cell://franka_sim"}, {"python": "/nowhere/python"})
    cameras = ("front", "wrist")

    @pytest.fixture
    def config(self, tmp_path: Path) -> SO101SimConfig:
        return twin(tmp_path, cameras=list(self.cameras))
