"""``rlinf-vla robot``: what it says and with which exit code; the arms are made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rlinf_vla import cli, plugins
from rlinf_vla.robot import CellError, Finding, RobotError


@dataclass
class MadeUpConfig:
    """A made-up arm."""

    name: str = "made_up"
    host: str = "???"
    broken: bool = False


class MadeUpRobot:
    def __init__(self, log: list[str], broken: bool) -> None:
        self.log, self.broken = log, broken

    def connect(self, timeout_s: float) -> None:
        self.log.append("connect")

    def home(self, timeout_s: float) -> None:
        if self.broken:
            raise RobotError("the arm was not home within 60 s")
        self.log.append("home")

    def close(self) -> None:
        self.log.append("close")


class MadeUp:
    Config = MadeUpConfig

    def __init__(self) -> None:
        self.log: list[str] = []

    def make(self, config: MadeUpConfig) -> Any:
        if config.host == "nowhere":
            raise CellError("mine.yaml: max_speed_m_s: missing")
        return MadeUpRobot(self.log, config.broken)

    def check(self, config: MadeUpConfig) -> Iterator[Finding]:
        yield Finding("connection", not config.broken, f"to {config.host}")

    def order(self, config: MadeUpConfig | None, order: str, person: str) -> list[str]:
        self.log.append(f"{order} by {person} at {config.host if config else 'all'}")
        return ["arm 1: stopped"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    plugin = MadeUp()
    monkeypatch.setattr(plugins, "robots", lambda: {"made_up": plugin})
    return plugin


def test_check_prints_a_table_and_fails_where_something_is_wrong(made_up: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["robot", "check", "robot=made_up", "robot.host=here"]) == 0
    assert "to here" in capsys.readouterr().out
    assert cli.run(["robot", "check", "robot=made_up", "robot.host=here", "robot.broken=true"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_home_lets_the_arm_go_whatever_happens(made_up: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["robot", "home", "robot=made_up", "robot.host=here"]) == 0
    assert made_up.log == ["connect", "home", "close"]
    assert cli.run(["robot", "home", "robot=made_up", "robot.host=here", "robot.broken=true"]) == 1
    assert made_up.log[-1] == "close"
    assert capsys.readouterr().err == "rlinf-vla: the arm was not home within 60 s\n"


def test_orders_go_to_one_arm_or_to_all(made_up: MadeUp) -> None:
    assert cli.run(["robot", "stop", "person=Ada"]) == 0
    assert cli.run(["robot", "acknowledge", "robot=made_up", "robot.host=here", "person=Ada"]) == 0
    assert made_up.log == ["stop by Ada at all", "acknowledge by Ada at here"]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["check"], 2, "which robot? robot=made_up"),
        (["chek", "robot=made_up"], 2, "did you mean check?"),
        ([], 2, "robot wants to know what to do"),
        (["check", "robot=made_up"], 2, "robot.host has no value: give robot.host=..."),
        (["check", "robot=made_up", "robot.hots=here"], 2, "did you mean robot.host?"),
        (["check", "robot=mad_up"], 2, "did you mean made_up?"),
        (["check", "robot=made_up", "robot.host=here", "robot.broken=perhaps"], 2, "robot.broken=perhaps"),
        (["acknowledge"], 2, "wants person=NAME"),
        (["home", "robot=made_up", "robot.host=nowhere"], 2, "mine.yaml: max_speed_m_s: missing"),
    ],
)
def test_mistakes_are_one_line(made_up: MadeUp, capsys: pytest.CaptureFixture[str], words: list[str], code: int, line: str) -> None:
    assert cli.run(["robot", *words]) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
