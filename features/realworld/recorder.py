"""Record an episode step by step, also to a journal, so that a killed process loses little."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rlinf_vla.core.io import parse_json
from rlinf_vla.core.types import Tensors
from rlinf_vla.features.realworld.control_loop import Step
from rlinf_vla.features.realworld.episode import IMAGE, Job, RobotEpisode
from rlinf_vla.features.realworld.robot import CONTACTS
from rlinf_vla.features.realworld.sensing import Reading


class EpisodeRecorder:
    """Call ``look`` at every control step, and ``act`` if the episode continues after it."""

    def __init__(
        self, job: Job, task: str, instruction: str, began: float, journal: EpisodeJournal
    ) -> None:
        """``journal``: must have begun this episode."""
        self._journal = journal
        self.job = job
        self.task = task
        self.instruction = instruction
        self.began = began
        self.success = self.terminated = False
        self.before: Reading | None = None
        """Observation at which the last action was chosen."""
        self._now: Step | None = None
        self._done: list[Step] = []
        self._rewards: list[float] = []
        self._costs: list[float] = []
        """Interventions of the safety filter reported after each action, until the next one."""
        self._rules: Counter[str] = Counter()

    @property
    def seen_something(self) -> bool:
        return self._now is not None

    def __len__(self) -> int:
        """Number of executed steps whose outcome was observed."""
        return max(0, len(self._steps) - 1)

    @property
    def last_action(self) -> Tensor:
        """Last executed action, float32 ``[D]``."""
        action = self._done[-1].action
        assert action is not None
        return torch.from_numpy(action)

    def look(self, step: Step) -> None:
        self._now = step
        self._rules.update(intervention.rule for intervention in step.interventions)
        if self._costs:
            self._costs[-1] += len(step.interventions)

    def act(self, step: Step) -> None:
        """Record the step's action, if any."""
        if step.action is not None:
            earned = (self._rewards[-1], self._costs[-1]) if self._done else (0.0, 0.0)
            self._journal.act(step, self._done[-1] if self._done else None, *earned)
            self._done.append(replace(step, action=np.array(step.action, np.float32)))
            self._rewards.append(0.0)
            self._costs.append(0.0)
            self.before = step.seen

    def reward(self, value: float) -> None:
        """Set the reward of the last action; while the arm is held, the latest call counts."""
        self._rewards[-1] = value

    @property
    def _steps(self) -> list[Step]:
        now = self._now
        return (
            [*self._done, now]
            if now is not None and (not self._done or self._done[-1].tick < now.tick)
            else [*self._done]
        )

    def episode(self, ended: str, fault: bool, weights: int) -> RobotEpisode:
        """Return the episode so far; at least one observation is required."""
        assert self._now is not None
        steps = self._steps
        done = steps[:-1]
        seen = [step.seen.observation(self.instruction) for step in steps]
        return RobotEpisode(
            job=self.job,
            task=self.task,
            instruction=self.instruction,
            images={
                name: torch.cat([observation.images[name] for observation in seen])
                for name in seen[0].images
            },
            state=torch.cat([observation.state for observation in seen]),
            tick=torch.tensor([step.tick for step in steps]),
            action=torch.from_numpy(np.array([step.action for step in done], np.float32))
            if done
            else torch.zeros(0, 0),
            human=torch.tensor([step.human for step in done], dtype=torch.bool),
            begins=torch.tensor(
                [_begins(step, before) for before, step in zip([None, *done], done, strict=False)],
                dtype=torch.bool,
            ),
            chosen=_chosen(done),
            reward=torch.tensor(self._rewards[: len(done)]),
            cost=torch.tensor(self._costs[: len(done)]),
            # a fault that an action caused is its failure; a policy must not learn from others
            terminated=ended.startswith(CONTACTS) if fault else self.terminated,
            success=self.success and not fault,
            ended=ended,
            fault=fault,
            weights=weights,
            interventions=dict(sorted(self._rules.items())),
        )


def _begins(step: Step, before: Step | None) -> bool:
    """Return whether the step's action is the first executed one of its inference."""
    if step.chosen is None:
        return False
    return before is None or before.chosen is None or before.chosen.chunk is not step.chosen.chunk


def _chosen(steps: Sequence[Step]) -> Tensor:
    """Return what the actor chose at each step, ``[N, ...]``; see :class:`RobotEpisode`."""
    chosen = [None if step.chosen is None else step.chosen.chunk.chosen for step in steps]
    shape = next((value.shape for value in chosen if value is not None), (0,))
    return torch.from_numpy(
        np.array(
            [np.zeros(shape) if value is None else value for value in chosen], np.float32
        ).reshape(len(steps), *shape)
    )


LOST = "the robot process was lost"
_LENGTH = struct.Struct("<Q")


class EpisodeJournal:
    """Journal of one episode at a time; written by a thread, so the loop never waits for a disk."""

    def __init__(self, path: Path | None) -> None:
        """``path``: None disables the journal."""
        self._path = path
        self._pool = ThreadPoolExecutor(1, "journal")
        self._writing = list[Future[None]]()
        self._broken = False
        """A record of this episode is missing or incomplete."""

    def begin(self, job: Job, task: str, instruction: str, weights: int) -> None:
        self._writing.clear()
        about = {"job": asdict(job), "task": task, "instruction": instruction, "weights": weights}
        self._append("wb", lambda: json.dumps(about).encode())

    def act(self, step: Step, before: Step | None, earned: float, cost: float) -> None:
        """Append a step that has an action; ``before``: the one executed before it, which earned
        ``earned`` at ``cost``."""
        assert step.action is not None
        action = torch.tensor(step.action, dtype=torch.float32)
        chosen = _chosen([step])
        begins = _begins(step, before)

        def record() -> bytes:
            seen = step.seen.observation("")
            facts = {
                "tick": step.tick,
                "human": step.human,
                "reward": earned,
                "cost": cost,
                "begins": begins,
            }
            images = {f"{IMAGE}{name}": value for name, value in seen.images.items()}
            numbers = {name: torch.tensor([value]) for name, value in facts.items()}
            return save(
                numbers | images | {"state": seen.state, "action": action[None], "chosen": chosen}
            )

        self._append("ab", record)

    def flush(self) -> None:
        """Wait until all records so far are written. Raises OSError if a write failed."""
        wait(self._writing)
        for write in self._writing:
            write.result()

    def end(self) -> None:
        """Delete the journal, as the episode has its own file. Raises OSError if a write failed."""
        self.flush()
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
    size = max(record["chosen"].numel() for record in records)
    for record in records:  # a step of the operator has an empty choice
        record["chosen"] = record["chosen"] if record["chosen"].numel() else torch.zeros(1, size)
    whole = {name: torch.cat([record[name] for record in records]) for name in records[0]}
    return RobotEpisode(
        job=Job(**about["job"]),
        task=about["task"],
        instruction=about["instruction"],
        images={
            name.removeprefix(IMAGE): value
            for name, value in whole.items()
            if name.startswith(IMAGE)
        },
        state=whole["state"],
        tick=whole["tick"],
        action=whole["action"][:-1],
        human=whole["human"][:-1],
        begins=whole["begins"][:-1],
        chosen=whole["chosen"][:-1],
        reward=whole["reward"][1:].float(),
        cost=whole["cost"][1:].float(),
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
        about = parse_json(next(parts, b""))
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
