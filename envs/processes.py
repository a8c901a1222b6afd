"""Run simulators in separate processes and recover those that crash, hang or are killed.

A simulator's future is a pure function of the episode and the actions since its reset, and the
parent holds both. When a process is lost, :class:`SimulatorPool` starts another, replays the
episodes under way and repeats the command in flight. The results are bit-identical to a run without
the loss. A command at which a simulator raises an exception, or at which processes are lost again
and again, costs the episodes that it was for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlinf_vla.config.errors import Failure
from rlinf_vla.core.channel import ChannelClosed
from rlinf_vla.core.child_process import ATTEMPTS, Child, Losses
from rlinf_vla.core.types import EXCEPTION_FAULT, FAULTS, LOST_FAULT

from . import frame_memory
from .shared_arrays import SharedArrays, SimulatorSpec
from .simulator_process import SimulatorError, SimulatorProcess

Row = list[Any]
"""One command for one slot: ``[slot, *arguments]``, JSON values only."""


@dataclass
class _Slot:
    episode: tuple[int, int] | None = None
    """(seed, task); None until a reset is complete."""
    executed: int = 0
    """Control steps since the reset; actions in ``SharedArrays.actions[slot, :executed]``."""


class SimulatorPool:
    """``slots`` single environments spread over ``processes`` processes.

    One command at a time: ``begin(verb, rows)``, then ``finish()``. The processes start in the
    background; the first use waits for them.

    program: command line after ``python``, for a module that calls ``serving.serve``.
    options: JSON values for the simulator's constructor.
    environment: added to this process's environment variables.
    python: interpreter of another Python environment for the processes; None takes this one.
    device: GPU on which the one process of this pool shows its frames; None: host memory.
    step_timeout, start_timeout: seconds per command and per start before a process counts as hung.
    """

    def __init__(
        self,
        program: Sequence[str],
        options: dict[str, Any],
        *,
        slots: int,
        processes: int,
        episode_limit: int,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
        device: torch.device | None = None,
        step_timeout: float = 120.0,
        start_timeout: float = 300.0,
    ) -> None:
        if device is not None and processes != 1:
            raise ValueError(f"{processes} processes share a GPU's memory: only one can")
        self.episode_limit = episode_limit
        self.restarts = 0
        """Number of lost processes that were replaced so far."""
        self.cut: dict[int, int] = {}
        """Slots whose episodes the last command ended; the index in ``FAULTS`` of the reason."""
        self.step_timeout = step_timeout
        self._start_timeout = start_timeout
        """Seconds without an answer after which a process is replaced."""
        self.slots = slots
        self._slots = [_Slot() for _ in range(slots)]
        self._memory = os.fdopen(os.memfd_create("rlinf-vla-simulators"), "w+b")
        self._arrays: SharedArrays | None = None
        self._device = device
        self._closed = self._told = False
        memory = self._memory.fileno()
        variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
        start = partial(
            Child, [*program, str(memory)], python=python, variables=variables, files=[memory]
        )
        message = {"options": options, "pool": slots, "episode_limit": episode_limit}
        self._processes: list[SimulatorProcess] = []
        for index in range(processes):
            owned = range(index * slots // processes, (index + 1) * slots // processes)
            self._processes.append(SimulatorProcess(start, message, owned))
            self._processes[-1].launch(start_timeout)

    @property
    def pids(self) -> list[int]:
        return [process.child.pid for process in self._processes]

    @property
    def spec(self) -> SimulatorSpec:
        self._wait_ready()
        return self._spec

    @property
    def arrays(self) -> SharedArrays:
        """Arrays that the simulators wrote; later commands overwrite them, so copy what is kept."""
        self._wait_ready()
        assert self._arrays is not None
        return self._arrays

    @property
    def frames(self) -> frame_memory.Frames:
        """What the slots show; later commands overwrite it, so copy what is kept."""
        self._wait_ready()
        return self._frames

    def executed(self, slot: int) -> int | None:
        """Control steps of the present episode of the slot; None before its first episode."""
        return self._slots[slot].executed if self._slots[slot].episode is not None else None

    def begin(self, verb: str, rows: Sequence[Row]) -> None:
        """Start a command on the slots that ``rows`` name.

        Rows by verb: ``reset`` [slot, seed, task]; ``step`` [slot, begin, end], with the actions in
        ``arrays``; ``expert`` [slot]; ``render`` [slot].
        """
        self._wait_ready()
        if any(process.command for process in self._processes):
            raise RuntimeError(f"{verb} was begun while another command is under way")
        for process in self._processes:
            own = [row for row in rows if row[0] in process.slots]
            if own:
                process.command = {"verb": verb, "rows": own}
                if verb == "reset":
                    for slot, *_ in own:
                        self._slots[slot] = (
                            _Slot()
                        )  # until the reset is done there is nothing to replay
                process.send(process.command, self.step_timeout)

    def finish(self) -> dict[int, Any]:
        """Wait for the command in flight. Returns slot -> its answer, without the slots in ``cut``.

        The answer to a step is the number of control steps so far.
        """
        answers: dict[int, Any] = {}
        self.cut = {}
        try:
            for process in self._processes:
                if process.command is None:
                    continue
                results = self._answer(process)["rows"]
                command = process.command
                for (slot, *arguments), answer in zip(command["rows"], results, strict=True):
                    answers[slot] = answer
                    if command["verb"] == "reset":
                        self._slots[slot] = _Slot(tuple(arguments))
                    elif command["verb"] == "step":
                        self._slots[slot].executed = answer
                process.command = None
                process.losses = Losses()
        except BaseException:
            self.close()  # some answers may still arrive, so the state is undefined
            raise
        return answers

    def close(self) -> None:
        """Kill the processes. Idempotent."""
        if not self._closed:
            self._closed = True
            for process in self._processes:
                process.child.end()
            self._memory.close()

    def _wait_ready(self) -> None:
        if self._closed:
            raise RuntimeError("the simulator pool is closed")
        if self._arrays is None:
            try:
                for process in self._processes:
                    self._settle(process)
            except BaseException:
                self.close()
                raise

    def _answer(self, process: SimulatorProcess) -> dict[str, Any]:
        """Return the answer to the command in flight; replace the process while it is lost."""
        while True:
            self._settle(process)
            assert process.command is not None
            if not process.command["rows"]:
                return {"rows": []}
            try:
                return process.receive()
            except (ChannelClosed, TimeoutError) as loss:
                self._replace(process, loss)
            except SimulatorError as error:
                if not error.slots:  # it failed when it started
                    raise
                self._cut(process, error.slots, EXCEPTION_FAULT, str(error))

    def _cut(
        self, process: SimulatorProcess, slots: Sequence[int], reason: int, message: str
    ) -> None:
        """Replace a process that failed at its command, without the episodes of ``slots``."""
        if not self._told:
            print(message, file=sys.stderr)
        self._told = True
        print(
            f"the episodes of {len(slots)} environments are cut: {FAULTS[reason]}",
            file=sys.stderr,
            flush=True,
        )
        assert process.command is not None
        process.command["rows"] = [row for row in process.command["rows"] if row[0] not in slots]
        for slot in slots:
            self.cut[slot] = reason
            self._slots[slot] = _Slot()
        process.child.end()
        self._relaunch(process)

    def _settle(self, process: SimulatorProcess) -> None:
        """Wait until the process is ready, has replayed its episodes and resumed its command."""
        while not process.ready:
            try:
                self._spec = SimulatorSpec(**process.receive()["spec"])
                process.started = True
                if self._arrays is None:
                    self._arrays = SharedArrays(
                        self._memory.fileno(), self._spec, self.slots, self.episode_limit
                    )
                    self._frames = frame_memory.of_arrays(self._arrays)
                    if self._device is not None:
                        self._on_device = frame_memory.allocated(
                            frame_memory.size(self._spec, self.slots), self._device
                        )
                if self._device is not None:
                    self._share(process)
                under_way = [(slot, self._slots[slot]) for slot in process.slots]
                replay = [
                    [slot, *state.episode, state.executed]
                    for slot, state in under_way
                    if state.episode is not None
                ]
                if replay:
                    process.send({"verb": "replay", "rows": replay}, self._start_timeout)
                    process.receive()
                process.ready = True
                if process.command is not None and process.command["rows"]:
                    process.send(process.command, self.step_timeout)
            except (ChannelClosed, TimeoutError) as loss:
                self._replace(process, loss)

    def _share(self, process: SimulatorProcess) -> None:
        """Let the process show its frames in memory of the GPU; in host memory if it cannot."""
        refusal: str | None
        try:
            handle = frame_memory.exported(self._on_device)
        except RuntimeError as error:
            refusal = str(error)
        else:
            process.send({"memory": handle}, self._start_timeout)
            refusal = process.receive().get("refused")
        if refusal is None:
            self._frames = frame_memory.within(self._on_device, self._spec, self.slots)
        else:
            print(
                f"images cross host memory, because CUDA IPC is not possible: {refusal}",
                file=sys.stderr,
                flush=True,
            )
            self._device = None
            assert self._arrays is not None
            self._frames = frame_memory.of_arrays(self._arrays)

    def _replace(self, process: SimulatorProcess, loss: Exception) -> None:
        exit_code = process.child.end()
        how = (
            f"did not answer for {process.child.allowed:.0f} s"
            if isinstance(loss, TimeoutError)
            else f"died with exit code {exit_code}"
        )
        # The first loss counts as 0: unlike its replacements, that process had nothing to replay.
        if process.losses.give_up(process.reached(self._arrays) if process.losses.in_a_row else 0):
            doing = (
                f"while it carried out '{process.command['verb']}'"
                if process.command
                else "while it started"
            )
            words = process.child.output_tail(20) or "(no output)"
            message = f"simulator processes were lost {ATTEMPTS} times in a row without progress: the last one {how} {doing}.\n{words}"
            if process.command is None or not process.command["rows"] or not process.started:
                raise Failure(message)
            self._cut(process, [row[0] for row in process.command["rows"]], LOST_FAULT, message)
            return
        self.restarts += 1
        self._relaunch(process)

    def _relaunch(self, process: SimulatorProcess) -> None:
        if self._arrays is not None:
            self._arrays.reached[process.slots] = 0
        process.launch(self._start_timeout)
