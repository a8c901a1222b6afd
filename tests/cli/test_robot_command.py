"""``rlinf-vla robot``: its output and exit codes, with fake arms."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict  # noqa: UP035

import pytest

from rlinf_vla.cli import main as cli
from rlinf_vla.core import plugins
from rlinf_vla.features.realworld import command
from rlinf_vla.features.realworld.robot import CellError, Finding, RobotError


@dataclass
class MadeUpConfig:
    """A fake arm."""

    name: str = "made_up"
    host: str = "???"
    broken: bool = False
    latched: str | None = None
    """No process drives it."""
    cameras: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006  (as the Franka's)


class MadeUpRobot:
    next_fault: str | None = None

    def __init__(self, log: list[str], broken: bool, latched: str | None) -> None:
        self.log = log
        self.broken = broken
        self.latched = latched

    def connect(self, timeout_s: float) -> None:
        self.log.append("connect")

    def home(self, timeout_s: float) -> None:
        if self.broken:
            raise RobotError("the arm was not home within 60 s")
        self.log.append("home")

    def observe(self) -> Any:
        return SimpleNamespace(fault=self.latched)

    def acknowledge(self, operator: str) -> None:
        self.log.append(f"{operator} acknowledges")
        self.latched = self.latched if self.broken else self.next_fault

    def close(self) -> None:
        self.log.append("close")


class MadeUp:
    Config = MadeUpConfig

    def __init__(self) -> None:
        self.log: list[str] = []

    def make(self, config: MadeUpConfig) -> Any:
        if config.host == "nowhere":
            raise CellError("mine.yaml: max_speed_m_s: missing")
        return MadeUpRobot(self.log, config.broken, config.latched)

    def check(self, config: MadeUpConfig) -> Iterator[Finding]:
        self.config = config
        yield Finding("connection", not config.broken, f"to {config.host}")

    def order(self, config: MadeUpConfig | None, order: str, operator: str) -> list[str]:
        if (config is None and order == "acknowledge") or (
            config is not None and config.host == "left"
        ):
            raise RobotError(f"nothing to {order}: nobody drives it")
        self.log.append(f"{order} by {operator} at {config.host if config else 'all'}")
        return ["arm 1: stopped"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    plugin = MadeUp()
    monkeypatch.setattr(plugins, "robots", lambda: {"made_up": plugin})
    return plugin


def test_check_prints_a_table_and_fails_if_a_check_fails(
    made_up: MadeUp, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["robot", "check", "robot=made_up", "robot.host=here"]) == 0
    assert "to here" in capsys.readouterr().out
    assert cli.run(["robot", "check", "robot=made_up", "robot.host=here", "robot.broken=true"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_check_takes_the_keys_of_a_session(
    made_up: MadeUp, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "robot.host=here",
        "+robot.cameras.front.driver=realsense",
        "+robot.cameras.front.max_age_s=1",
    ]
    assert cli.run(["robot", "check", "robot=made_up", *words]) == 0
    assert made_up.config.cameras == {"front": {"driver": "realsense", "max_age_s": 1}}


def test_home_releases_the_arm_in_all_cases(
    made_up: MadeUp, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["robot", "home", "robot=made_up", "robot.host=here"]) == 0
    assert made_up.log == ["connect", "home", "close"]
    assert cli.run(["robot", "home", "robot=made_up", "robot.host=here", "robot.broken=true"]) == 1
    assert made_up.log[-1] == "close"
    assert capsys.readouterr().err == "rlinf-vla: the arm was not home within 60 s\n"


def test_commands_are_sent_to_one_arm_or_to_all(made_up: MadeUp) -> None:
    assert cli.run(["robot", "stop", "operator=Ada"]) == 0
    assert (
        cli.run(["robot", "acknowledge", "robot=made_up", "robot.host=here", "operator=Ada"]) == 0
    )
    assert made_up.log == ["stop by Ada at all", "acknowledge by Ada at here"]


def test_a_broken_plugin_does_not_prevent_a_stop(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SimpleNamespace()  # its ``order`` is missing
    monkeypatch.setattr(plugins, "robots", lambda: {"broken": broken, "made_up": made_up})
    assert cli.run(["robot", "stop", "operator=Ada"]) == 1
    assert made_up.log == ["stop by Ada at all"]
    assert capsys.readouterr().err.startswith(
        "rlinf-vla: robot=broken cannot stop its arms: AttributeError"
    )


STOP = """
import sys
from rlinf_vla.cli.main import run
assert run(["robot", "stop", *sys.argv[1:]]) == 1
heavy = {"torch", "hydra", "rich", "transformers", "mujoco"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "chosen",
    [[], ["robot=franka_sim"], ["robot=franka", "robot.host=172.16.0.2", "robot.cell=mine.yaml"]],
)
def test_a_stop_imports_little(chosen: list[str], tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", STOP, *chosen],
        check=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )


def test_a_latched_fault_is_acknowledged(
    made_up: MadeUp, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RECOVERY_S", 0.3)
    words = ["robot", "acknowledge", "operator=Ada", "robot=made_up", "robot.host=left"]
    assert cli.run([*words, "robot.latched=a reflex"]) == 0
    assert capsys.readouterr().out == "a reflex: acknowledged by Ada\n"
    assert made_up.log == ["connect", "Ada acknowledges", "close"]
    monkeypatch.setattr(MadeUpRobot, "next_fault", "stopped by Bob")
    assert cli.run([*words, "robot.latched=a reflex"]) == 0
    assert (
        capsys.readouterr().out
        == "a reflex: acknowledged by Ada; still latched: stopped by Bob: acknowledge that, too\n"
    )
    assert cli.run([*words, "robot.latched=a reflex", "robot.broken=true"]) == 1
    assert capsys.readouterr().err.startswith(
        "rlinf-vla: a reflex: still there 0.3 s after the acknowledgement"
    )
    assert cli.run(words) == 1 and made_up.log[-1] == "close"
    assert capsys.readouterr().err == "rlinf-vla: nothing to acknowledge: nobody drives it\n"
    assert cli.run(words[:3]) == 1
    assert (
        capsys.readouterr().err
        == "rlinf-vla: nothing to acknowledge: nobody drives it; give robot=NAME to clear an earlier fault\n"
    )


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["check"], 2, "which robot? robot=made_up"),
        (["chek", "robot=made_up"], 2, "did you mean check?"),
        ([], 2, "robot needs a verb"),
        (["check", "robot=made_up"], 2, "robot.host has no value: give robot.host=..."),
        (["check", "robot=made_up", "robot.hots=here"], 2, "did you mean robot.host?"),
        (["check", "robot=mad_up"], 2, "did you mean made_up?"),
        (
            ["check", "robot=made_up", "robot.host=here", "robot.broken=perhaps"],
            2,
            "robot.broken=perhaps",
        ),
        (["acknowledge"], 2, "needs operator=NAME"),
        (["home", "robot=made_up", "robot.host=nowhere"], 2, "mine.yaml: max_speed_m_s: missing"),
    ],
)
def test_mistakes_are_one_line(
    made_up: MadeUp, capsys: pytest.CaptureFixture[str], words: list[str], code: int, line: str
) -> None:
    assert cli.run(["robot", *words]) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
