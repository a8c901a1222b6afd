"""Serve a simulator whose environments form one batch: reset one by one, stepped together.

The counterpart of ``serving`` for single environments; the parent sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_vla.core.images import through_jpeg

from . import frame_memory
from .batched import Batch
from .shared_arrays import SharedArrays


class BatchServer:
    """Server of a :class:`Batch`: ``serve(create, BatchServer)``.

    An episode that ends within a chunk keeps stepping, unrecorded. Rows of the batch beyond the
    slots of the process get zero actions.
    """

    def __init__(self, batch: Batch, arrays: SharedArrays, first: int) -> None:
        self.batch = batch
        self.arrays = arrays
        self.first = first
        self._frames = frame_memory.of_arrays(arrays)
        self._seeds = [0] * self.batch.num_envs

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute a verb on rows ``[slot, *arguments]``; answer with one entry per row."""
        if "memory" in command:
            return self._move_to(command["memory"])
        verb: Callable[..., Any] = getattr(self, command["verb"])
        return {"rows": verb(*zip(*command["rows"], strict=True))}

    def reset(
        self, slots: tuple[int, ...], seeds: tuple[int, ...], tasks: tuple[int, ...]
    ) -> list[str]:
        instructions = self._reset(slots, seeds)
        self._observe(slots)
        return instructions

    def step(
        self, slots: tuple[int, ...], begin: tuple[int, ...], end: tuple[int, ...]
    ) -> list[int]:
        """Execute actions ``begin:end``, up to the first terminal one. Returns steps so far."""
        arrays = self.arrays
        slot = np.array(slots)
        done = np.array(begin)
        last = np.array(end)
        while (alive := done < last).any():
            at = slot[alive], done[alive]
            reward, terminated, success, truncated = (
                values[slot - self.first] for values in self._step(*at)
            )
            arrays.record(at, reward[alive], terminated[alive], success[alive], truncated[alive])
            done[alive] += 1
            over = alive & (terminated | truncated)
            last[over] = done[over]
            if (ended := alive & (done == last)).any():
                self._observe(tuple(slot[ended].tolist()))
        executed: list[int] = done.tolist()
        return executed

    def replay(
        self,
        slots: tuple[int, ...],
        seeds: tuple[int, ...],
        tasks: tuple[int, ...],
        executed: tuple[int, ...],
    ) -> list[None]:
        """Rebuild a lost simulator; staggered starts bring all episodes to the present at once."""
        slot = np.array(slots)
        count = np.array(executed)
        longest = max(executed)
        for now in range(-longest, 1):
            begun = [i for i in range(len(slots)) if -executed[i] == now]
            if begun:
                self._reset([slots[i] for i in begun], [seeds[i] for i in begun])
            if now < 0:
                under_way = count + now >= 0
                self._step(slot[under_way], (count + now)[under_way])
        return [None] * len(slots)

    def expert(self, slots: tuple[int, ...]) -> list[None]:
        advice = self.batch.expert().cpu().numpy()
        for slot in slots:
            self.arrays.expert[slot] = advice[slot - self.first]
        return [None] * len(slots)

    def render(self, slots: tuple[int, ...]) -> list[None]:
        for slot in slots:
            self.arrays.picture[:] = self.batch.render(slot - self.first).cpu().numpy()
        return [None] * len(slots)

    def _reset(
        self, slots: tuple[int, ...] | list[int], seeds: tuple[int, ...] | list[int]
    ) -> list[str]:
        rows = [slot - self.first for slot in slots]
        for row, seed in zip(rows, seeds, strict=True):
            self._seeds[row] = seed
        instructions = self.batch.reset(list(self._seeds), rows)
        self.arrays.reached[list(slots)] = 1
        return [instructions[row] for row in rows]

    def _step(
        self, slots: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[Any], ...]:
        """Step the batch once; return reward, terminated, success and truncated of all its rows.

        Each of ``slots`` gets its recorded action of that number; the other slots get zeros.
        """
        actions = np.zeros((self.batch.num_envs, self.batch.spec.action_dim), np.float32)
        actions[slots - self.first] = self.arrays.actions[slots, numbers]
        outcome = self.batch.step(torch.from_numpy(actions).to(self.batch.device))
        reward, *flags = (
            torch.stack([tensor.float() for tensor in outcome]).cpu().numpy()
        )  # one wait for the device, not three
        self.arrays.reached[slots] += 1
        if len(flags) < 3:  # the simulator itself truncates nothing
            flags.append(np.zeros_like(reward))
        return reward, *(flag > 0 for flag in flags)

    def _observe(self, slots: tuple[int, ...]) -> None:
        state, images = self.batch.observe([slot - self.first for slot in slots])
        frames = self._frames
        rows = torch.tensor(slots, device=self._frames.device)
        frames.state[rows] = state.to(frames.device)
        for (name, image), as_jpeg in zip(frames.images.items(), self.arrays.as_jpeg, strict=True):
            image[rows] = images[name].to(frames.device)
            if as_jpeg:
                frames.jpeg[name][rows] = through_jpeg(images[name]).to(frames.device)
        frames.settle()

    def _move_to(self, handle: dict[str, Any]) -> dict[str, Any]:
        """Show frames in the parent's memory of the GPU from now on, if it can be mapped here."""
        try:
            memory = frame_memory.opened(handle)
        except RuntimeError as error:
            return {"refused": str(error)}
        self._frames = frame_memory.within(memory, self.batch.spec, len(self.arrays.reached))
        return {}
