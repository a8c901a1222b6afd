"""The learner's client of the robot process, with a fake link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.interrupt import Interrupted
from rlinf_vla.features.realworld.client import RobotClient
from rlinf_vla.features.realworld.episode import TRAINING, Job
from rlinf_vla.features.realworld.robot import RobotError

JOB = Job(TRAINING, 0, 7)


class Link:
    """Implements ``RobotLink``: ``said`` is answered next; ``gone`` is why the process is lost."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.gone: str | None = None
        self.given: list[Job] = []
        self.ended = False

    def give(self, job: Job) -> None:
        self.given.append(job)

    def publish(self, weights: Path) -> None: ...

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        assert seconds == 0, "updates are running: it must not wait"
        found = self.said
        self.said = []
        return found

    def lost(self) -> str | None:
        return self.gone

    def end(self) -> None:
        self.ended = True


class Client:
    def __init__(self, directory: Path) -> None:
        self.links: list[Link] = []
        self.said: list[str] = []
        self.robot = RobotClient(directory, self._connect, self.said.append)

    def _connect(self) -> Link:
        self.links.append(Link())
        return self.links[-1]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


def test_without_a_job_there_is_nothing_to_attend_to(client: Client) -> None:
    client.robot.attend()
    assert not client.links


def test_a_fault_is_shown_during_updates(client: Client) -> None:
    client.robot.begin(JOB)
    client.links[0].said = [{"waiting": "reflex", "for": "acknowledge"}, {}]
    client.robot.attend()
    assert client.said == ["the robot waits for 'acknowledge': reflex"]


def test_a_slow_simulation_is_reported(client: Client) -> None:
    client.robot.begin(JOB)
    client.links[0].said = [{"slow": "the arm's clock runs at 0.43 of real time"}]
    client.robot.attend()
    assert client.said[0].startswith("the arm's clock runs at 0.43 of real time: ")


def test_a_dead_process_is_replaced_during_updates(client: Client) -> None:
    client.robot.begin(JOB)
    client.links[0].gone = "the robot process sent nothing for 90 s"
    client.robot.attend()
    assert client.links[0].ended and client.links[1].given == [JOB]
    assert client.said == ["the robot process sent nothing for 90 s; starting a new one"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"left": "Ada said quit"}, Interrupted),
        ({"mistake": "m"}, UserError),
        ({"robot": "r"}, RobotError),
        ({"error": "e"}, RuntimeError),
    ],
)
def test_what_ends_the_session_is_raised_after_the_updates(
    client: Client, answer: dict[str, str], kind: type[BaseException]
) -> None:
    client.robot.begin(JOB)
    client.links[0].said = [answer]
    client.links[0].gone = "it has ended"
    for _ in range(3):
        client.robot.attend()
    assert len(client.links) == 1, "it is not replaced"
    idle: Callable[[], None] = lambda: pytest.fail("it is raised at once")  # noqa: E731
    with pytest.raises(kind):
        client.robot.episode(JOB, idle)
    assert "ends after this iteration's updates" in client.said[-1]
