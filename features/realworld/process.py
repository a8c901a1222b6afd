"""Run the robot process: ``python -m rlinf_vla.features.realworld.process RUN_DIR``.

It reads the recipe in the run directory, takes jobs from the learner, and answers with messages.
Episodes and the learner's weights are files in the run directory; an episode is on disk before the
next one begins. When the learner closes the channel the arm stops; without the message ``end``
this is a latched fault.

Answers: ``{"played": FILE}``, ``{"waiting": WHY, "for": WORD}``, ``{"going_on": WHY}``,
``{"slow": WHAT}`` (the arm's clock),
``{"left": WHY}``, ``{"mistake": WHAT}`` (UserError), ``{"robot": WHAT}`` (RobotError),
``{"error": WHAT}``; and ``{}`` about once a second as a heartbeat.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.channel import Channel, ChannelClosed
from rlinf_vla.features.realworld.episode import TRAINING, Job, RobotEpisode
from rlinf_vla.features.realworld.operator_session import OperatorLeft
from rlinf_vla.features.realworld.recorder import recover_episode
from rlinf_vla.features.realworld.robot import RobotError

WEIGHTS = "weights.safetensors"
UNDER_WAY = ".under_way"
"""File of the running episode, next to the finished ones; it remains if this process is killed."""
END = "end"
"""Last message of a learner that ends regularly."""
LEARNER_GONE, SESSION_OVER = "the learner is gone", "the session is over"
END_S = 20.0
"""Time limit to write the running episode and to end the arm's process, which stops the arm."""


class CommandReader:
    """Read jobs in a thread; call ``leave`` with the reason when the learner closes the channel."""

    def __init__(self, learner: Channel) -> None:
        self._learner = learner
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self.ended: str | None = None
        self.leave = lambda why: None
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, rest: Any) -> Job | None:
        """Wait for the next job, calling ``rest`` meanwhile; return None at the end."""
        while True:
            try:
                return self._jobs.get(timeout=0.1)
            except queue.Empty:
                rest()

    def _read(self) -> None:
        why = LEARNER_GONE
        with suppress(ChannelClosed):
            while END not in (message := self._learner.wait()):
                self._jobs.put(Job(**message))
            why = SESSION_OVER
        self.ended = why
        self._jobs.put(None)
        self.leave(why)
        threading.Timer(
            END_S, os._exit, [1]
        ).start()  # so that a hung process does not outlive the learner for long


class AnswerWriter:
    """Send answers in order; never wait for a learner, which may be too busy to read."""

    def __init__(self, learner: Channel) -> None:
        self._learner = learner
        self._unsent = deque[dict[str, Any]]()

    def __call__(self, answer: dict[str, Any], timeout: float | None = 0.0) -> None:
        """Send this answer and earlier ones; what finds no room waits for the next call."""
        self._unsent.append(answer)
        with suppress(BlockingIOError, ChannelClosed):
            while self._unsent:
                self._learner.send(self._unsent[0], timeout)
                self._unsent.popleft()


def main(directory: Path) -> None:
    """Run the learner's jobs at the robot of ``directory``'s recipe; report errors as answers."""
    for signum in (signal.SIGINT, signal.SIGHUP):  # the learner handles them and ends this process
        signal.signal(signum, signal.SIG_IGN)
    learner = Channel.to_parent()
    answer, orders = AnswerWriter(learner), CommandReader(learner)
    from rlinf_vla.runtime import recipes
    from rlinf_vla.runtime.saved_recipe import read_saved

    try:
        _play(recipes.read(read_saved(directory)), directory, orders, answer)
        last = {"left": str(orders.ended)}
    except OperatorLeft as left:
        last = {"left": str(left)}
    except UserError as error:
        last = {"mistake": str(error)}
    except RobotError as error:
        last = {"robot": str(error)}
    except Exception as error:
        traceback.print_exc()
        last = {"error": f"{type(error).__name__}: {error}"}
    answer(last, None)


def _play(recipe: Any, directory: Path, orders: CommandReader, answer: AnswerWriter) -> None:
    from rlinf_vla.core.io import write_json
    from rlinf_vla.features.realworld.cell import open_cell
    from rlinf_vla.features.realworld.loop_statistics import merged_statistics
    from rlinf_vla.runtime.run_directory import EPISODES
    from rlinf_vla.telemetry.run_files import CONTROL_FILE

    episodes, control = directory / EPISODES, directory / CONTROL_FILE
    before = json.loads(control.read_text()) if control.exists() else {}
    journal_path = episodes / UNDER_WAY
    cut = recover_episode(journal_path)
    # a cut training episode is kept; others are repeated in full
    if cut is not None and cut.job.kind == TRAINING and not (episodes / cut.job.file).exists():
        cut.write(episodes)
    journal_path.unlink(missing_ok=True)
    with open_cell(recipe, answer, journal_path=journal_path) as cell:
        orders.leave = cell.player.leave
        if orders.ended is not None:
            return

        def keep(episode: RobotEpisode) -> None:
            path = episode.write(episodes)
            write_json(control, merged_statistics(before, cell.player.accounting.document()))
            answer({"played": path.name})

        try:
            while (job := orders.next(cell.player.rest)) is not None:
                if (episodes / job.file).exists():
                    answer({"played": job.file})
                    continue
                version = cell.player.meanwhile(lambda: cell.inference.pull(directory / WEIGHTS))
                cell.inference.begin(job)
                cell.player.play(job, keep, version)
        finally:
            if (
                orders.ended == LEARNER_GONE
            ):  # latched: an operator checks before the arm moves again
                cell.robot.stop(LEARNER_GONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads that wait for a device or for input would block a normal exit
