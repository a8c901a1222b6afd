"""Draw the layouts of several environments in one call, each as if it were alone.

ManiSkill draws the layouts of all rows of a batch from the seed of environment 0, but an episode
must depend on its own seed alone. Within ``rows_drawn`` each row has generators of its own, on the
CPU, so a seed has the layout of the cpu backend, whichever rows begin with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = (torch.rand, torch.randn, torch.randint)


class NotByRow(Exception):
    """What was drawn has no row for each environment."""


class Generators(TorchFunctionMode):
    """Stand in for PyTorch's generator and for ``_episode_rng``, with one of each per row."""

    def __init__(self, seeds: Sequence[int], numbers: Sequence[np.random.RandomState]) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.numbers = numbers

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in DRAWS:
            return function(*args, **(kwargs or {}))
        options = {"device": None} | (kwargs or {})
        device = options.pop("device")
        size: Any = options.pop("size", None)
        if size is None:
            first = next((i for i, each in enumerate(args) if isinstance(each, Sequence)), None)
            if first is None and function is torch.randint:
                raise NotByRow
            size = args if first is None else args[first]
            args = () if first is None else tuple(args[:first])
        one = self._of_one(size)
        drawn = [
            function(*args, one, generator=generator, device="cpu", **options)
            for generator in self.generators
        ]
        return torch.cat(drawn).to(device or "cpu")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of ``np.random.RandomState`` whose last argument is the size."""
        if name.startswith("_"):
            raise AttributeError(name)

        def draw(*arguments: Any, size: Any = None) -> Any:
            if size is None:
                *rest, size = arguments
                arguments = tuple(rest)
            one = self._of_one(size if isinstance(size, tuple) else ())
            return np.concatenate([getattr(each, name)(*arguments, one) for each in self.numbers])

        return draw

    @contextmanager
    def only(self, row: int) -> Iterator[None]:
        """Within the context there is one row."""
        everyone = self.generators, self.numbers
        self.generators = [self.generators[row]]
        self.numbers = [self.numbers[row]]
        try:
            yield
        finally:
            self.generators, self.numbers = everyone

    def _of_one(self, size: Sequence[int]) -> tuple[int, ...]:
        if not size or size[0] != len(self.generators):
            raise NotByRow
        return (1, *size[1:])


@contextmanager
def rows_drawn(seeds: Sequence[int], numbers: Sequence[np.random.RandomState]) -> Iterator[Any]:
    """Within the context each row draws for itself; yield what stands in for ``_episode_rng``.

    ``numbers``: ManiSkill's own generators of the rows. Raises NotByRow, from within or at the end
    of the context, if anything else is drawn.
    """
    from mani_skill.envs.utils.randomization.samplers import UniformPlacementSampler

    generators = Generators(seeds, numbers)
    sample_all = UniformPlacementSampler.sample

    def sample(sampler: Any, radius: float, max_trials: int, *rest: Any, **keywords: Any) -> Tensor:
        """Reject and draw again in each row apart, or a row's next draws depended on others."""
        apart = [one_row(sampler, row) for row in range(sampler.batch_size)]
        places = []
        for row, alone in enumerate(apart):
            with generators.only(row):
                places.append(sample_all(alone, radius, max_trials, *rest, **keywords))
        sampler.fixtures_radii = apart[0].fixtures_radii
        if apart[0].fixture_positions is not None:
            sampler.fixture_positions = torch.cat([one.fixture_positions for one in apart], dim=1)
        return torch.cat(places)

    before = _global_state()
    with patch.object(UniformPlacementSampler, "sample", sample), generators:
        yield generators
    if any(not torch.equal(a, b) for a, b in zip(before, _global_state(), strict=True)):
        raise NotByRow


def one_row(sampler: Any, row: int) -> Any:
    """Return a ``UniformPlacementSampler`` of a row of ``sampler``."""
    alone = type(sampler)(sampler._bounds, 1)
    alone.fixtures_radii = sampler.fixtures_radii
    if sampler.fixture_positions is not None:
        alone.fixture_positions = sampler.fixture_positions[:, row : row + 1]
    return alone


def _global_state() -> list[Tensor]:
    return [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    )
