"""The process beside a robot: ``python -m rlinf_vla.commands.robot_process RUN_DIR``.

It reads the recipe there, takes jobs from its standard input, and answers on its standard output, one JSON object per line. Episodes are
files in the run directory, on disk before the next begins; the learner's weights are a file there, too. Where its input ends the arm stops;
where it ends without a farewell, that is latched.

Answers: ``{"played": FILE}``, ``{"waiting": WHY, "for": WORD}``, ``{"going_on": WHY}``, ``{"left": WHY}``, ``{"mistake": WHAT}``,
``{"robot": WHAT}``, ``{"error": WHAT}``; and ``{}`` about once a second: still here.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from rlinf_vla.robot import CellError, RobotError
from rlinf_vla.rollout.robot_attendant import Left
from rlinf_vla.rollout.robot_episode import TRAINING, Job, RobotEpisode
from rlinf_vla.rollout.robot_spool import recovered
from rlinf_vla.types import UserError

WEIGHTS = "weights.safetensors"
UNDER_WAY = ".under_way"
"""Beside the episodes: what there is of the one that is being played; also where this process was killed in it."""
FAREWELL = "farewell\n"
"""The last line of a learner that ends in its own time; without it, the end of the input is a fault."""
LEARNER_GONE, SESSION_OVER = "the learner is gone", "the session is over"
FAREWELL_S = 20.0
"""For the episode under way to be written, and for the arm's process to end; that one makes the arm stand by itself."""


class Orders:
    """Lines of the standard input, read in a thread of their own; ``leave`` is told why they ended."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.ended: str | None = None
        self.leave = lambda why: None
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, rest: Any) -> Job | None:
        """The next job; None at the end. ``rest`` is called meanwhile."""
        while True:
            try:
                line = self._lines.get(timeout=0.1)
            except queue.Empty:
                rest()
                continue
            return None if line is None else Job(**json.loads(line))

    def _read(self) -> None:
        why = LEARNER_GONE
        for line in iter(sys.stdin.readline, ""):
            if line == FAREWELL:
                why = SESSION_OVER
                break
            self._lines.put(line)
        self.ended = why
        self._lines.put(None)
        self.leave(why)
        threading.Timer(FAREWELL_S, os._exit, [1]).start()  # nothing that hangs outlives the learner for long


class Answers:
    """A learner that is gone hears nothing, and that is no error here."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer

    def __call__(self, answer: dict[str, Any]) -> None:
        try:
            print(json.dumps(answer), file=self._out, flush=True)
        except BrokenPipeError:
            return


def main(directory: Path) -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):  # they are for the learner, which ends this process in its own time
        signal.signal(signum, signal.SIG_IGN)
    answer, orders = Answers(), Orders()
    from rlinf_vla import recipe as recipes
    from rlinf_vla.recipe.kept import read_kept

    try:
        _play(recipes.read(read_kept(directory)), directory, orders, answer)
        answer({"left": str(orders.ended)})
    except Left as left:
        answer({"left": str(left)})
    except (UserError, CellError) as error:
        answer({"mistake": str(error)})
    except RobotError as error:
        answer({"robot": str(error)})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


def _play(recipe: Any, directory: Path, orders: Orders, answer: Answers) -> None:
    from rlinf_vla.atomic import write_json
    from rlinf_vla.commands.robot_cell import opened
    from rlinf_vla.rollout.accounting import added
    from rlinf_vla.telemetry.run_directory import CONTROL_FILE
    from rlinf_vla.training.run_directory import EPISODES

    episodes, control = directory / EPISODES, directory / CONTROL_FILE
    before = json.loads(control.read_text()) if control.exists() else {}
    under_way = episodes / UNDER_WAY
    cut = recovered(under_way)
    # others than training's are played again, to their end
    if cut is not None and cut.job.kind == TRAINING and not (episodes / cut.job.file).exists():
        cut.write(episodes)
    under_way.unlink(missing_ok=True)
    with opened(recipe, answer, under_way=under_way) as cell:
        orders.leave = cell.player.leave
        if orders.ended is not None:
            return

        def keep(episode: RobotEpisode) -> None:
            path = episode.write(episodes)
            write_json(control, added(before, cell.player.accounting.document()))
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
            if orders.ended == LEARNER_GONE:  # a person looks before the arm moves again
                cell.robot.stop(LEARNER_GONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads that wait for a device or for lines would keep it
