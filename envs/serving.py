"""Define the interface of a single-environment simulator and serve it to the parent process.

A simulator's module ends with ``if __name__ == "__main__": serve(MySimulator)``. Needs numpy and
the simulator only.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.channel import Channel, ChannelClosed

from .shared_arrays import SharedArrays, SimulatorSpec

PICTURE_SIZE = 256
"""Height and width of images for display, in pixels."""


class Step(NamedTuple):
    reward: float
    terminated: bool
    success: bool
    truncated: bool = False
    """The simulator itself ends the episode, which could go on otherwise."""


class SlotError(Exception):
    """An exception in the simulator of a single slot, which is its argument."""


class Seen(NamedTuple):
    state: NDArray[np.float32]
    """``[S]``"""
    images: dict[str, NDArray[np.uint8]]
    """name -> ``[H, W, 3]``"""


class Simulator(Protocol):
    """Single environments, the ``slots``, in one process.

    A slot's future depends only on its last ``reset`` and the actions since, bit-identically. It
    never depends on other slots, on earlier episodes, or on how often it was observed.
    """

    spec: SimulatorSpec

    def reset(self, slot: int, seed: int, task: int) -> str:
        """Begin an episode and return its instruction."""

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        """Execute one control step with ``action`` ``[D]``. Renders nothing."""

    def observe(self, slot: int) -> Seen: ...

    def expert(self, slot: int) -> NDArray[np.float32]:
        """Return the scripted expert's action ``[D]``. Raises UserError if there is no expert."""

    def render(self, slot: int) -> NDArray[np.uint8]:
        """Image for display, ``[H, W, 3]``."""


class Server(Protocol):
    """Executes the parent's commands on the slots of one process."""

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute a verb on rows ``[slot, *arguments]``; answer with one entry per row."""


def serve(
    create: Callable[[dict[str, Any], int], Any],
    server: Callable[[Any, SharedArrays, int], Server] | None = None,
) -> None:
    """Serve ``create(options, number of slots)`` until the parent exits.

    Called in a process that ``SimulatorPool`` started. ``create`` returns a :class:`Simulator`, or
    an object with a ``spec`` from which ``server(object, arrays, first slot)`` makes a
    :class:`Server`. A UserError of theirs ends the parent's command: the simulator cannot run here
    or with these options. After another exception the process ends; one in a step costs the parent
    only the episodes of its slots.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    channel = Channel.to_parent()
    memory = int(sys.argv[-2])
    channel.exit_with_peer()
    command: dict[str, Any] = {}
    try:
        start = channel.wait()
        simulator = create(start["options"], start["slots"])
        arrays = SharedArrays(memory, simulator.spec, start["pool"], start["episode_limit"])
        serving = (server or SlotServer)(simulator, arrays, start["first"])
        channel.send({"spec": asdict(simulator.spec)}, None)
        while True:
            command = channel.wait()
            channel.send(serving.answer(command), None)
    except ChannelClosed:
        return
    except UserError as error:
        channel.send({"unusable": str(error)}, None)
    except Exception as error:
        slots = (
            list(error.args)
            if isinstance(error, SlotError)
            else [row[0] for row in command.get("rows", [])]
        )
        message = "".join(
            traceback.format_exception(error.__cause__ if isinstance(error, SlotError) else error)
        )
        channel.send({"error": message.rstrip(), "slots": slots}, None)


class SlotServer:
    """Server of a :class:`Simulator`; this process owns the pool's slots from ``first`` on."""

    def __init__(self, simulator: Simulator, arrays: SharedArrays, first: int) -> None:
        self.simulator = simulator
        self.arrays = arrays
        self.first = first

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        verb: Callable[..., Any] = getattr(self, command["verb"])
        results = []
        for slot, *arguments in command["rows"]:
            try:
                results.append(verb(slot, *arguments))
            except UserError:
                raise
            except Exception as error:
                raise SlotError(slot) from error
        return {"rows": results}

    def reset(self, slot: int, seed: int, task: int) -> str:
        instruction = self._reset(slot, seed, task)
        self._observe(slot)
        return instruction

    def step(self, slot: int, begin: int, end: int) -> int:
        """Execute actions ``begin:end``, up to the first terminal one. Returns steps so far."""
        arrays = self.arrays
        done = begin
        while done < end:
            outcome = Step(*self.simulator.step(slot - self.first, arrays.actions[slot, done]))
            arrays.record((slot, done), *outcome)
            done += 1
            arrays.reached[slot] += 1
            if outcome.terminated or outcome.truncated:
                break
        self._observe(slot)
        return done

    def replay(self, slot: int, seed: int, task: int, executed: int) -> None:
        """Rebuild a lost simulator by replay. Writes no results: the parent still has them."""
        self._reset(slot, seed, task)
        for action in self.arrays.actions[slot, :executed]:
            self.simulator.step(slot - self.first, action)
            self.arrays.reached[slot] += 1

    def expert(self, slot: int) -> None:
        self.arrays.expert[slot] = self.simulator.expert(slot - self.first)

    def render(self, slot: int) -> None:
        self.arrays.picture[:] = self.simulator.render(slot - self.first)

    def _reset(self, slot: int, seed: int, task: int) -> str:
        instruction = self.simulator.reset(slot - self.first, seed, task)
        self.arrays.reached[slot] = 1
        return instruction

    def _observe(self, slot: int) -> None:
        state, images = self.simulator.observe(slot - self.first)
        self.arrays.state[slot] = state
        self.arrays.show(slot, images)
