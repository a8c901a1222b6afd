"""Child processes: their channel, their end, their last output, and the limit of losses."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from rlinf_vla.core.channel import ChannelClosed
from rlinf_vla.core.child_process import Child, Losses

START = (
    "import sys, time\nfrom rlinf_vla.core.channel import Channel\nparent = Channel.to_parent()\n"
)
Run = Callable[..., Child]


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts a child that carries out some code; ends it after the test."""
    children: list[Child] = []

    def start(code: str, **options: object) -> Child:
        children.append(Child(["-c", START + code], **options))  # type: ignore[arg-type]
        return children[-1]

    yield start
    for child in children:
        child.end(0.0)


def test_a_child_answers_and_has_its_arguments(run: Run) -> None:
    child = run(
        "import os; parent.send({'heard': parent.wait(), 'variable': os.environ['ANSWER']})",
        variables={"ANSWER": "42"},
    )
    child.channel.send({"question": 6})
    assert child.channel.receive(60.0) == {"heard": {"question": 6}, "variable": "42"}


def test_the_end_of_a_child_is_detected_with_its_last_output(run: Run) -> None:
    child = run("print('one'); print('two'); print(flush=True); sys.exit('three')")
    with pytest.raises(ChannelClosed):
        child.channel.wait()
    assert child.wait(60.0) == 1
    assert child.output_tail() == "three" and child.output_tail(2) == "two\nthree"
    assert child.end() == 1 and child.output_tail(9) == "one\ntwo\nthree", "kept after its end"


def test_a_child_counts_as_hung_after_its_time_limit(run: Run) -> None:
    child = run("parent.wait()")
    child.allow(3600.0)
    assert child.remaining > 3000 and child.allowed == 3600.0
    child.allow(0.0)
    assert child.remaining == 0


def test_a_child_that_does_not_exit_is_killed(run: Run) -> None:
    child = run("parent.send({})\ntime.sleep(3600)")
    assert child.channel.wait() == {} and child.wait(0.0) is None
    assert child.end(0.0) == -signal.SIGKILL == child.end(0.0)


def test_a_busy_child_exits_when_its_parent_closes_the_channel(run: Run) -> None:
    child = run("parent.exit_with_peer()\nparent.send({})\ntime.sleep(3600)")
    assert child.channel.wait() == {}
    assert child.end(60.0) == 0


def test_a_missing_interpreter_is_an_error_and_leaves_nothing_open() -> None:
    with pytest.raises(FileNotFoundError):
        Child(["module.py"], python="/no/python")


@pytest.mark.parametrize(
    ("reached", "given_up_at"),
    [([0, 0, 0], 2), ([0, 1, 2, 3, 3, 3], 5), ([3, 1, 2], 2), ([0, 0, 1, 1], None)],
)
def test_losses_without_progress_are_bounded(reached: list[float], given_up_at: int | None) -> None:
    losses = Losses()
    given_up = [losses.give_up(each) for each in reached]
    assert given_up == [place == given_up_at for place in range(len(reached))]
