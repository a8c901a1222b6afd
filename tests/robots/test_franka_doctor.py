from __future__ import annotations

import pytest

from rlinf_vla.robots.franka import doctor
from rlinf_vla.robots.franka.plugin import franka, franka_sim
from tests.skips import needs


def test_what_is_not_installed_is_optional_and_has_a_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    found = [*franka.diagnose(), *franka_sim.diagnose()]
    assert [each.name for each in found] == ["franky", "OpenCV", "RealSense", "franky-sim"]
    for each in found:
        assert not each.ok and each.detail == "optional: not installed" and each.fix == "pip install 'rlinf-vla[franka]'"


def test_a_package_that_lacks_a_library_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> None:
        raise ImportError("libusb-1.0.so.0: cannot open shared object file")

    monkeypatch.setattr(doctor, "find_spec", lambda module: object())
    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = {each.name: each for each in franka.diagnose()}
    assert not found["RealSense"].ok and "libusb" in found["RealSense"].detail and found["RealSense"].fix == doctor.LIBUSB


@needs("franka")
def test_versions_and_the_kernel_are_told() -> None:
    found = {each.name: each for each in franka.diagnose()}
    assert found["franky"].ok and found["franky"].detail[0].isdigit()
    assert found["real-time kernel"].ok == doctor.realtime()
