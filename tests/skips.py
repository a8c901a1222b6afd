"""Which tests may be skipped, and why. Any other skip fails the run."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

MODULES = {
    "maniskill": ("mani_skill",),
    "libero": ("libero", "robosuite", "mujoco"),
    "genesis": ("genesis",),
    "newton": ("newton", "mujoco"),
    "franka": ("franky", "franky_sim", "cv2"),
    "ray": ("ray",),
    "peers": ("torchrl",),
    "openpi": ("tensorstore",),
    "serve": ("starlette", "uvicorn", "websockets", "msgpack", "prometheus_client"),
    "browser": ("playwright",),
    "trackers": ("wandb", "trackio", "mlflow", "sqlalchemy", "alembic"),
}
"""Packages of each extra of pyproject.toml that tests need."""

METAWORLD = Path(__file__).parents[1] / ".venv-metaworld" / "bin" / "python"
"""What `make metaworld` makes: Meta-World wants another MuJoCo than the extras."""

NOT_INSTALLED = "not installed: EXTRAS="

ALLOWED = {
    "has a GPU": "what a machine without a GPU answers is shown on such machines",
    "this kernel has real time": "what a kernel without real time answers is shown on such machines",
    "libusb is not installed": "librealsense cannot be imported without it, and a package manager's rights are needed for it",
    "network namespaces cannot be made here": "they need root's rights",
    "make cluster-test": "takes minutes and root's rights; make test-nightly does it",
    "make libero-reference": "another MuJoCo in an environment of its own; make test-nightly makes it",
    "make metaworld": "another MuJoCo in an environment of its own; make test-all makes it",
    "make serve-clients": "clients of other projects in environments of their own; make test-nightly makes them",
    "make lerobot": "LeRobot's robots in an environment of their own; make test-nightly makes it",
    "LEROBOT_PYTHON names no Python": "lerobot wants Python 3.12 and another torch",
    "beside the checkout": "recordings of published environments are not in the repository",
    "gymnasium-robotics is not installed": "it fails on the MuJoCo of the extras (docs/metaworld.md)",
    "Chromium is not installed": "no package of Python brings it; apt-get install chromium, then tests/features/view/test_browser.py runs",
    "zsh is not installed": "its completion is tested where it is: apt-get install zsh",
    "fish is not installed": "its completion is tested where it is: apt-get install fish",
    "make timm": "timm brings a torchvision, which breaks transformers beside a torch without CUDA; make test-all makes it",
    "no scripted expert": "the conformance suite asks a simulator for what it offers",
    "actions do not move a tool": "the conformance suite asks a simulator for what it offers",
    "an evaluation recipe": "it trains nothing",
    "a robot's recipe": "tests/robots plays it at the simulated arm",
}
"""Keys are parts of the skip's reason."""

WITH_ALL_EXTRAS = {"make metaworld", "make timm"}
"""Of these, the reasons not allowed with ``--all-extras``: `make test-all` prepares for them."""
WITH_ALL_PEERS = {
    "make cluster-test",
    "make libero-reference",
    "make serve-clients",
    "make lerobot",
}
"""Those that are not allowed with ``--all-peers`` either: `make test-nightly` prepares for them."""


def missing(extra: str) -> bool:
    return any(find_spec(module) is None for module in MODULES[extra])


def needs(extra: str) -> pytest.MarkDecorator:
    """Of tests that import what ``extra`` installs."""
    return pytest.mark.skipif(missing(extra), reason=NOT_INSTALLED + extra)


def require(extra: str) -> None:
    """The same inside a fixture or a test."""
    if missing(extra):
        pytest.skip(NOT_INSTALLED + extra)


def python_with_metaworld() -> str | None:
    """``env.python`` of a fixture or test with Meta-World: None if it is installed here. Skips where there is neither."""
    if find_spec("metaworld") is not None:
        return None
    if not METAWORLD.exists():
        pytest.skip("make metaworld")
    return str(METAWORLD)


class SkipCheck:
    """A plug-in of pytest that knows all skips of a run, on however many workers."""

    def __init__(self, all_extras: bool, all_peers: bool, refused: list[str]) -> None:
        self.all_extras = all_extras
        self.prepared = (WITH_ALL_EXTRAS if all_extras else set()) | (
            WITH_ALL_PEERS if all_peers else set()
        )
        self.refused = refused
        """A line for each skip that is not allowed is added here."""
        self.reasons: dict[str, str] = {}
        """By test, or by module where all of it was skipped."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            assert isinstance(report.longrepr, tuple)
            self.reasons[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def allowed(self, reason: str) -> bool:
        if NOT_INSTALLED in reason:
            return not self.all_extras
        return any(part in reason for part in ALLOWED if part not in self.prepared)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        refused = [
            f"{name} is skipped: {reason}"
            for name, reason in self.reasons.items()
            if not self.allowed(reason)
        ]
        self.refused += refused
        if session.exitstatus == pytest.ExitCode.OK and refused:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, count in sorted(Counter(self.reasons.values()).items()):
            verdict = next((f" ({why})" for part, why in ALLOWED.items() if part in reason), "")
            verdict = verdict if self.allowed(reason) else ": NOT ALLOWED, see tests/skips.py"
            terminalreporter.write_line(f"{count} skipped: {' '.join(reason.split())}{verdict}")
