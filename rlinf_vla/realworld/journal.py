"""Journal the current episode to a file step by step, so that a killed process loses little."""

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

from rlinf_vla.core.types import Tensors
from rlinf_vla.realworld.control_step import Step
from rlinf_vla.realworld.episode import IMAGE, Job, RobotEpisode

LOST = "the robot process was lost"
_LENGTH = struct.Struct("<Q")


class EpisodeJournal:
    """Journal of one episode at a time; written by a thread, so the loop never waits for a disk."""

    def __init__(self, path: Path | None) -> None:
        """``path``: None disables the journal."""
        self._path, self._pool, self._writing = path, ThreadPoolExecutor(1, "journal"), list[Future[None]]()
        self._broken = False
        """A record of this episode is missing or incomplete."""

    def begin(self, job: Job, task: str, instruction: str, weights: int) -> None:
        self._writing.clear()
        about = {"job": asdict(job), "task": task, "instruction": instruction, "weights": weights}
        self._append("wb", lambda: json.dumps(about).encode())

    def act(self, step: Step, earned: float) -> None:
        """Append a step that has an action; ``earned``: reward of the action before it."""
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
        """Delete the journal, as the episode has its own file. Raises OSError if a write failed."""
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
                return  # a record behind an incomplete one is unreadable, and gaps are not allowed
            self._broken = True
            data = record()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode) as file:
                file.write(_LENGTH.pack(len(data)) + data)
            self._broken = False

        self._writing.append(self._pool.submit(write))


def recover_episode(path: Path) -> RobotEpisode | None:
    """Return the journalled episode, truncated before its last action, whose outcome is unknown.

    None if it has no step with a known outcome.
    """
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
    """Read up to the first unreadable record, such as an incomplete one."""
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
