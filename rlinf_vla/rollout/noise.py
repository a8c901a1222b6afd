"""Counter-based random numbers, a function of (run seed, episode, control step) alone.

Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11), written in
int64 tensor operations: every device gives the same bits, and a whole batch costs a few kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlinf_vla.core.protocols import NoiseKeys

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
EXPLORATION = 1
LEVEL = 2
IMITATION = 3
DETOUR = 4
DELAY = 5
WORD_ORDER = 6
AUGMENTATION = 7
MIXTURE = 8
"""Streams of random numbers; the policy uses stream 0."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words per counter. Words are int64 tensors in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # the int64 product wraps; its low word and, after masking, its high word are still correct
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c1 = p1 & _MASK
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c3 = p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


class CounterNoise:
    """Random numbers of one policy call for a batch of (episode, control step); a ``Noise``."""

    def __init__(
        self, run_seed: int, task_id: Tensor, seed: Tensor, step: Tensor, stream: int = 0
    ) -> None:
        """``task_id``, ``seed``, ``step``: int64 ``[B]``.
        ``stream`` separates independent uses (policy, exploration, ...) within one call."""
        self.keys = NoiseKeys(run_seed, task_id, seed, step)
        self._key = (run_seed & _MASK, (run_seed >> 32) & _MASK)
        self._episode = (seed & _MASK, task_id & _MASK, step & _MASK)
        self._block = stream << 20  # next unused block of the fourth counter word

    def words(self, count: int) -> Tensor:
        """Return the next random 32-bit words, int64 ``[B, count]``."""
        blocks = math.ceil(count / 4)
        seed, task, step = (word[:, None].expand(-1, blocks) for word in self._episode)
        block = torch.arange(self._block, self._block + blocks, device=seed.device).expand(
            len(seed), -1
        )
        self._block += blocks
        return torch.stack(philox((block, step, task, seed), self._key), dim=-1).flatten(1)[
            :, :count
        ]

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 ``[B, *shape]`` in (0, 1): the upper 23 bits, plus half a step."""
        words = self.words(math.prod(shape))
        return (((words >> 9).double() + 0.5) * 2.0**-23).float().reshape(-1, *shape)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal float32 ``[B, *shape]``, by Box-Muller."""
        count = math.prod(shape)
        u = self.uniform(2, count).double()
        return (
            (torch.sqrt(-2 * torch.log(u[:, 0])) * torch.cos(2 * math.pi * u[:, 1]))
            .float()
            .reshape(-1, *shape)
        )


def imitation_noise(run_seed: int, draws: Tensor, stream: int = IMITATION) -> CounterNoise:
    """Return the noise of an imitation loss; ``draws`` int64 ``[B]``, >= 0, are its keys."""
    return CounterNoise(run_seed, torch.zeros_like(draws), draws, draws >> 32, stream)


def augmentation_noise(run_seed: int, draws: Tensor) -> CounterNoise:
    """Return the noise of the images' augmentation; ``draws`` as of ``imitation_noise``."""
    return imitation_noise(run_seed, draws, AUGMENTATION)
