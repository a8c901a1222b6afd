"""The robot process's end of the channel to its learner."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.features.realworld import process
from rlinf_vla.features.realworld.episode import TRAINING, Job
from rlinf_vla.features.realworld.process import (
    END,
    LEARNER_GONE,
    SESSION_OVER,
    AnswerWriter,
    CommandReader,
)


def test_a_slow_learner_loses_no_answer_and_blocks_nothing(pair: tuple[Channel, Channel]) -> None:
    learner, robot = pair
    answer = AnswerWriter(robot)
    for number in range(5000):
        answer({"number": number})
    last = threading.Thread(target=answer, args=({"left": "over"}, None))
    last.start()
    heard = []
    while "left" not in (message := learner.wait()):
        heard.append(message["number"])
    last.join()
    assert heard == list(range(5000))


def test_a_learner_that_is_gone_does_not_stop_the_robot_process(
    pair: tuple[Channel, Channel],
) -> None:
    learner, robot = pair
    answer = AnswerWriter(robot)
    learner.close()
    answer({}, None)


@pytest.mark.parametrize(("ended", "why"), [(True, SESSION_OVER), (False, LEARNER_GONE)])
def test_jobs_arrive_in_order_followed_by_the_reason_of_the_end(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, ended: bool, why: str
) -> None:
    limited = threading.Event()
    monkeypatch.setattr(
        process.threading,
        "Timer",
        lambda seconds, work, arguments: SimpleNamespace(start=limited.set),
    )
    learner, robot = pair
    jobs = [Job(TRAINING, number, 7 + number) for number in range(3)]
    for job in jobs:
        learner.send(vars(job))
    if ended:
        learner.send({END: True})
    learner.hang_up()
    reader = CommandReader(robot)
    assert [reader.next(lambda: None) for _ in range(4)] == [*jobs, None] and reader.ended == why
    with pytest.raises(ChannelClosed):
        robot.wait()
    assert limited.wait(120), "it comes last: after this test, a real timer would end this process"
