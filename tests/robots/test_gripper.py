"""The thread that drives the hand, with a fake hand: which commands it sends, and whether it holds something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from franka_session import wait_until
from obedient import CELL

from tests.skips import require


class Command:
    def __init__(self, hand: Hand, width: float) -> None:
        self._hand = hand
        self._width = width

    def wait(self, seconds: float) -> bool:
        return self._hand.arrived(self._width)

    def get(self) -> bool:
        return True


class Hand:
    """Fingers that move by 5 mm each time their width is read, at most to ``widest``, and an object
    between them."""

    server_version = 3
    max_width = 0.08

    def __init__(self, host: str) -> None:
        self.at = 0.08
        self.object = 0.0
        self.goal = 0.08
        self.widest = 0.08
        self.log: list[tuple[Any, ...]] = []
        self.looks = 0

    @property
    def state(self) -> Any:
        return SimpleNamespace(width=self.at, max_width=self.max_width)

    @property
    def width(self) -> float:
        self.looks += 1
        self.at = min(max(self.goal, self.at - 0.005, self.object), self.at + 0.005, self.widest)
        return self.at

    def arrived(self, width: float) -> bool:
        return abs(self.at - max(width, self.object)) < 1e-9

    def move_async(self, width: float, speed: float) -> Command:
        return self._begin("move", width)

    def grasp_async(
        self, width: float, speed: float, force: float, inner: float, outer: float
    ) -> Command:
        return self._begin("grasp", width)

    def stop(self) -> None:
        self.log.append(("stop",))
        self.goal = self.at

    def _begin(self, what: str, width: float) -> Command:
        self.log.append((what, width))
        self.goal = width
        return Command(self, width)


@pytest.fixture
def gripper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    require("franka")
    import franky

    from rlinf_vla.robots.franka.gripper import FrankyGripper

    monkeypatch.setattr(franky, "Gripper", lambda host: hands.append(Hand(host)) or hands[-1])
    hands: list[Hand] = []
    made = FrankyGripper("made up", CELL)
    yield SimpleNamespace(pursue=made.pursue, driver=made, hand=hands[0])
    made.close()


def soon(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, 120, what)  # only bounds a hang


def test_a_grasp_on_nothing_holds_nothing(gripper: Any) -> None:
    gripper.pursue(0.0)
    soon(lambda: gripper.hand.at == 0.0, "it closes")
    assert (
        not gripper.driver.holding
        and gripper.driver.problem is None
        and gripper.hand.log == [("grasp", 0.0)]
    )


def test_a_grasp_on_an_object_holds_it_until_it_is_lost(gripper: Any) -> None:
    gripper.hand.object = 0.04
    gripper.pursue(0.0)
    soon(lambda: gripper.driver.holding, "it holds")
    assert gripper.hand.at == 0.04
    gripper.hand.object = 0.0
    soon(lambda: not gripper.driver.holding, "the object is lost")


def test_other_widths_do_not_restart_a_grasp(gripper: Any) -> None:
    gripper.hand.object = 0.04
    gripper.pursue(0.0)
    soon(lambda: gripper.hand.at < 0.07, "it is closing")
    gripper.pursue(0.01)
    soon(lambda: gripper.driver.holding, "it holds")
    for width in (0.003, 0.02, 0.038, 0.042):
        gripper.pursue(width)
        until = gripper.hand.looks + 3
        soon(lambda: gripper.hand.looks > until, "the thread has seen the width")  # noqa: B023
        assert gripper.driver.holding and gripper.hand.at == 0.04
    assert gripper.hand.log == [("grasp", 0.0)]
    gripper.pursue(0.06)
    soon(lambda: gripper.hand.log[-1] == ("move", 0.06), "it opens")
    soon(
        lambda: gripper.hand.at == 0.06 and not gripper.driver.holding, "it has released the object"
    )


def test_a_stop_keeps_a_grasp_and_stops_moving_fingers(gripper: Any) -> None:
    gripper.hand.object = 0.04
    gripper.pursue(0.0)
    soon(lambda: gripper.driver.holding, "it holds")
    gripper.driver.stop()
    soon(lambda: not gripper.driver.halting, "the stop is done")
    assert gripper.hand.log == [("grasp", 0.0)] and gripper.driver.holding
    gripper.hand.widest = 0.06  # so that it has not arrived before the stop
    gripper.pursue(0.08)
    soon(lambda: gripper.hand.at > 0.05, "it opens")
    gripper.driver.stop()
    soon(lambda: gripper.hand.log[-1] == ("stop",), "the fingers stop")
