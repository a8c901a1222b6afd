"""Findings of ``rlinf-vla doctor`` and ``rlinf-vla robot check`` without an arm."""

from __future__ import annotations

import dataclasses

import pytest

from rlinf_vla.robots import cell_file
from rlinf_vla.robots.cell import Cell
from rlinf_vla.robots.franka import check
from rlinf_vla.robots.franka.plugin import franka, franka_sim
from tests.skips import needs

SHIPPED = cell_file.load(cell_file.CELLS / "franka_sim.yaml", Cell)


def test_missing_packages_are_optional_and_have_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda module: None)
    found = [*franka.diagnose(), *franka_sim.diagnose()]
    assert [each.name for each in found] == ["franky", "OpenCV", "RealSense", "franky-sim"]
    for each in found:
        assert (
            not each.ok
            and each.detail == "optional: not installed"
            and each.fix == "pip install 'rlinf-vla[franka]'"
        )


def test_a_package_that_lacks_a_library_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(module: str) -> None:
        raise ImportError("libusb-1.0.so.0: cannot open shared object file")

    monkeypatch.setattr(check, "find_spec", lambda module: object())
    monkeypatch.setattr(check.importlib, "import_module", broken)
    found = {each.name: each for each in franka.diagnose()}
    assert (
        not found["RealSense"].ok
        and "libusb" in found["RealSense"].detail
        and found["RealSense"].fix == check.LIBUSB
    )


@needs("franka")
def test_versions_and_the_kernel_are_reported() -> None:
    found = {each.name: each for each in franka.diagnose()}
    assert found["franky"].ok and found["franky"].detail[0].isdigit()
    assert found["real-time kernel"].ok == check.realtime()


def test_unreachable_points_are_named_with_the_reason() -> None:
    found = check.unreachable(
        dataclasses.replace(SHIPPED, workspace_x_m=(0.28, 0.65), workspace_z_m=(0.02, 0.55))
    )
    assert found[0.28, 0.0, 0.1525] == "joint 4 at its limit", "folded, close to the base"
    assert found[0.65, 0.3, 0.55] == "too far" and found[0.65, -0.3, 0.55] == "too far"
    assert (0.4650, 0.0, 0.02) not in found and len(found) < 20


def test_in_the_shipped_box_the_arm_is_never_stretched() -> None:
    """There joint 4 turns far for a short path of the tool. Close to the base the arm is folded, and goals end early enough."""
    found = check.unreachable(SHIPPED)
    assert {x for x, _, _ in found} == {SHIPPED.workspace_x_m[0]} and set(found.values()) == {
        "joint 4 at its limit"
    }


def test_all_points_of_a_box_in_the_middle_are_reachable() -> None:
    box = {
        "workspace_x_m": (0.35, 0.55),
        "workspace_y_m": (-0.2, 0.2),
        "workspace_z_m": (0.05, 0.45),
    }
    assert check.unreachable(dataclasses.replace(SHIPPED, **box)) == {}
