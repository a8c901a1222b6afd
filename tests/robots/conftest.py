"""One simulated cell for all tests (franky-sim takes seconds to start). Each test gets an arm at home, released and without a fault."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import chaos_page
import pytest
from chaos import Round
from franka_session import Session

from rlinf_vla.robots.simulated.client import SimulatedCell
from tests.skips import require


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cell" in getattr(item, "fixturenames", ()):
            item.add_marker("realtime")


@pytest.fixture(scope="session")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCell]:
    require("franka")
    simulated = SimulatedCell(tmp_path_factory.mktemp("cell"))
    simulated.start(120, ["front"], 64, 64, 15)
    yield simulated
    simulated.close()


@pytest.fixture(scope="session")
def wall_clock_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file with an offset in seconds; processes started from now on see a wall clock with this offset."""
    path = tmp_path_factory.mktemp("wall_clock") / "off"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "stepped_clock"), prepend=":")
        patch.setenv("WALL_CLOCK_OFF", str(path))
        yield path


@pytest.fixture(scope="session")
def all_rounds() -> list[Round]:
    return []


@pytest.fixture
def rounds(all_rounds: list[Round]) -> Iterator[list[Round]]:
    """Results of all rounds; written as a page after each test if ROBOT_CHAOS_PAGE is set."""
    yield all_rounds
    if page := os.environ.get("ROBOT_CHAOS_PAGE"):
        Path(page).write_text(
            chaos_page.page(all_rounds, Path(page).read_text() if Path(page).exists() else "")
        )


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
            cell.fix(fault)
