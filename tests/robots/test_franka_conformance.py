"""The simulated Franka passes the conformance suite of robots: real franky against franky-sim."""

from __future__ import annotations

import pytest
from franka_session import CELL_YAML, clear_latch

from rlinf_vla.robots.franka.config import FrankaSimConfig
from rlinf_vla.robots.franka.plugin import franka_sim
from rlinf_vla.robots.simulated.client import SimulatedCell
from rlinf_vla.testing.robot import RobotConformance

pytestmark = pytest.mark.simulator


class TestFrankaSim(RobotConformance):
    plugin = franka_sim
    wrong_configs = ({"cell": "cell://nowhere"}, {"cell": "nowhere.yaml"}, {"python": "/nope"})

    @pytest.fixture
    def config(self, cell: SimulatedCell) -> FrankaSimConfig:
        clear_latch(cell.folder)
        patient = cell.folder / "patient.yaml"
        patient.write_text(CELL_YAML)
        return FrankaSimConfig(
            folder=str(cell.folder), cell=str(patient), max_age_s=2.0, frozen_s=10.0
        )
