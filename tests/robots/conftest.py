"""One simulated cell for all tests: franky-sim takes seconds to start. Each test gets an arm that is at home, sound and let go."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from franka_session import Session

from rlinf_vla.robots.simulated.client import SimulatedCell


@pytest.fixture(scope="session")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCell]:
    for package in ("franky", "franky_sim"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: EXTRAS=franka")
    simulated = SimulatedCell(tmp_path_factory.mktemp("cell"))
    simulated.start(120, [], 128, 128, 20)
    yield simulated
    simulated.close()


@pytest.fixture
def session(cell: SimulatedCell) -> Iterator[Session]:
    made = Session(cell)
    try:
        if made.robot.observe().fault:
            made.acknowledge()
        made.robot.home(30)
        yield made
    finally:
        made.robot.close()
        for fault in ("udp_silence", "silent", "user_stop", "gripper"):
            cell.mend(fault)
