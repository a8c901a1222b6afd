"""The simulator's side of a process whose slots are one batch: they can be reset one by one, but step together.

What ``serving`` is for single environments; the parent does not see the difference. numpy and the batch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .serving import SimulatorSpec, serve
from .wire import SharedArrays

if TYPE_CHECKING:
    from .batched import Batch


def serve_together(create: Callable[[dict[str, Any], int], Batch]) -> None:
    """Serve ``create(options, number of slots)``, on the CPU, until the parent is gone."""
    serve(lambda options, slots: _Simulator(create(options, slots)), _Server)


class _Simulator:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        tool = batch.tool
        self.spec = SimulatorSpec(
            batch.action_dim,
            batch.state_dim,
            batch.control_hz,
            {name: list(size) for name, size in batch.images.items()},
            list(batch.picture),
            None if tool is None else [tool.translation_m, tool.rotation_rad],
            batch.stack,
        )


class _Server:
    """Carries out each of the parent's commands on all its slots at once. One that ends before the others moves on unseen."""

    def __init__(self, simulator: _Simulator, arrays: SharedArrays, first: int) -> None:
        self.batch, self.arrays, self.first = simulator.batch, arrays, first
        self._seeds = [0] * self.batch.num_envs

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """``command``: a verb, and one row ``[slot, *arguments]`` for each slot concerned. The answer has one entry per row."""
        verb: Callable[..., Any] = getattr(self, command["verb"])
        return {"rows": verb(*zip(*command["rows"], strict=True))}

    def reset(self, slots: tuple[int, ...], seeds: tuple[int, ...], tasks: tuple[int, ...]) -> list[str]:
        instructions = self._reset(slots, seeds)
        self._observe(slots)
        return instructions

    def step(self, slots: tuple[int, ...], begin: tuple[int, ...], end: tuple[int, ...]) -> list[int]:
        """Execute the recorded actions ``begin:end`` up to the first terminal one. Returns how many control steps each episode has now."""
        arrays, done = self.arrays, dict(zip(slots, begin, strict=True))
        alive = {slot: last for slot, last in zip(slots, end, strict=True) if done[slot] < last}
        while alive:
            reward, terminated, success = self._step({slot: done[slot] for slot in alive})
            ended = []
            for slot in alive:
                row, now = slot - self.first, done[slot]
                arrays.reward[slot, now], arrays.terminated[slot, now], arrays.success[slot, now] = (
                    reward[row],
                    terminated[row],
                    success[row],
                )
                done[slot] = now + 1
                if terminated[row] or done[slot] == alive[slot]:
                    ended.append(slot)
            if ended:
                self._observe(tuple(ended))
            for slot in ended:
                del alive[slot]
        return list(done.values())

    def replay(self, slots: tuple[int, ...], seeds: tuple[int, ...], tasks: tuple[int, ...], executed: tuple[int, ...]) -> list[None]:
        """Bring a new simulator to where a lost one was: episodes begin one after the other, so that all are where they were at the end."""
        longest = max(executed)
        for now in range(-longest, 1):
            begun = [i for i in range(len(slots)) if -executed[i] == now]
            if begun:
                self._reset([slots[i] for i in begun], [seeds[i] for i in begun])
            if now < 0:
                self._step({slot: count + now for slot, count in zip(slots, executed, strict=True) if count + now >= 0})
        return [None] * len(slots)

    def expert(self, slots: tuple[int, ...]) -> list[None]:
        advice = np.asarray(self.batch.expert())
        for slot in slots:
            self.arrays.expert[slot] = advice[slot - self.first]
        return [None] * len(slots)

    def render(self, slots: tuple[int, ...]) -> list[None]:
        for slot in slots:
            self.arrays.picture[:] = np.asarray(self.batch.render(slot - self.first))
        return [None] * len(slots)

    def _reset(self, slots: tuple[int, ...] | list[int], seeds: tuple[int, ...] | list[int]) -> list[str]:
        rows = [slot - self.first for slot in slots]
        for row, seed in zip(rows, seeds, strict=True):
            self._seeds[row] = seed
        instructions = self.batch.reset(list(self._seeds), rows)
        return [instructions[row] for row in rows]

    def _step(self, now: dict[int, int]) -> tuple[Any, Any, Any]:
        """One control step of the batch: slot -> which of its recorded actions. The others get zeros."""
        import torch  # the batch's own

        actions = np.zeros((self.batch.num_envs, self.batch.action_dim), np.float32)
        for slot, index in now.items():
            actions[slot - self.first] = self.arrays.actions[slot, index]
        return tuple(np.asarray(each) for each in self.batch.step(torch.from_numpy(actions)))  # type: ignore[return-value]

    def _observe(self, slots: tuple[int, ...]) -> None:
        state, images = self.batch.observe([slot - self.first for slot in slots])
        self.arrays.state[list(slots)] = np.asarray(state)
        for name, image in images.items():
            self.arrays.images[name][list(slots)] = np.asarray(image)
