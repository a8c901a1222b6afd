"""The episode under way, appended to a file as it happens: what a process saw that is killed in it is not lost."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rlinf_vla.rollout.control_step import Step
from rlinf_vla.rollout.robot_episode import IMAGE, Job, RobotEpisode
from rlinf_vla.types import Tensors

LOST = "the process beside the robot was lost"
_LENGTH = struct.Struct("<Q")


class Spool:
    """One episode at a time. Written by a thread, in order: the control loop does not wait for a disk."""

    def __init__(self, path: Path | None) -> None:
        """``path``: None keeps nothing."""
        self._path, self._pool, self._writing = path, ThreadPoolExecutor(1, "spool"), list[Future[None]]()
        self._broken = False
        """A record of this episode is not there, or not whole."""

    def begin(self, job: Job, task: str, instruction: str, weights: int) -> None:
        self._writing.clear()
        about = {"job": asdict(job), "task": task, "instruction": instruction, "weights": weights}
        self._append("wb", lambda: json.dumps(about).encode())

    def act(self, step: Step, earned: float) -> None:
        """A step with an action, and what the action before it had earned."""
        assert step.action is not None
        action = torch.tensor(step.action, dtype=torch.float32)

        def record() -> bytes:
            seen = step.seen.observation("")
            facts = {"tick": step.tick, "human": step.human, "reward": earned}
            images = {f"{IMAGE}{name}": value for name, value in seen.images.items()}
            return save(
                {name: torch.tensor([value]) for name, value in facts.items()} | images | {"state": seen.state, "action": action[None]}
            )

        self._append("ab", record)

    def end(self) -> None:
        """The episode has a file of its own. Raises OSError where the disk did not take something meanwhile."""
        writing, self._writing = self._writing, []
        for each in writing:
            each.result()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _append(self, mode: str, record: Callable[[], bytes]) -> None:
        path = self._path
        if path is None:
            return

        def write() -> None:
            if self._broken and mode == "ab":
                return  # nobody could find it behind a record that was cut short, and there may be no gap
            self._broken = True
            data = record()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode) as file:
                file.write(_LENGTH.pack(len(data)) + data)
            self._broken = False

        self._writing.append(self._pool.submit(write))


def recovered(path: Path) -> RobotEpisode | None:
    """What was left there, cut before its last action, of which nobody knows what came; None where that is nothing."""
    about, records = _read(path)
    if about is None or len(records) < 2:
        return None
    whole = {name: torch.cat([record[name] for record in records]) for name in records[0]}
    return RobotEpisode(
        job=Job(**about["job"]),
        task=about["task"],
        instruction=about["instruction"],
        images={name.removeprefix(IMAGE): value for name, value in whole.items() if name.startswith(IMAGE)},
        state=whole["state"],
        tick=whole["tick"],
        action=whole["action"][:-1],
        human=whole["human"][:-1],
        reward=whole["reward"][1:].float(),
        terminated=False,
        success=False,
        ended=LOST,
        fault=True,
        weights=about["weights"],
    )


def _read(path: Path) -> tuple[Mapping[str, Any] | None, list[Tensors]]:
    """Up to the first record that cannot be read, as one that was not written to its end."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, []
    parts = _parts(data)
    try:
        about = json.loads(next(parts, b""))
    except ValueError:
        return None, []
    records = list[Tensors]()
    with suppress(ValueError, SafetensorError):
        for part in parts:
            records.append(load(part))
    return about, records


def _parts(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if at > len(data):
            return
        yield data[at - length : at]
