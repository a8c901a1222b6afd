"""A trainer rank of an off-policy algorithm, with its part of the replay buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf_vla.algorithms.off_policy import OffPolicyConfig
from rlinf_vla.core.types import Tensors
from rlinf_vla.data.from_dataset import dataset_transitions
from rlinf_vla.runtime.off_policy import append_all, learn_from_replay, open_replays
from rlinf_vla.runtime.workers.base import fetched
from rlinf_vla.runtime.workers.shards import Packed
from rlinf_vla.runtime.workers.trainer import TrainerWorker


class LearnerWorker(TrainerWorker):
    """A trainer rank of an off-policy algorithm, with its part of the replay buffers."""

    def open_replays(
        self, directory: Path, state: dict[str, Any], instructions: tuple[str, ...]
    ) -> list[tuple[int, int]]:
        """Open the buffers; return (records ever added, records to sample from) of each."""
        self.policy.fit_instructions(instructions)
        self.replays = open_replays(directory, self.algorithm.config, state)
        return [(store.total, len(store)) for store in self.replays]

    def append(self, number: int, acted: Packed, episode: Sequence[Any]) -> tuple[int, int]:
        """Add an episode. ``episode``: its records, or a reference to them, which only one rank
        stores; the others need ``acted``."""
        store = self.replays[number]
        if store.stores_next:
            store.append(self.algorithm.stored(fetched(episode[0]).tensors()))
        else:
            store.append(acted.tensors())
        return store.total, len(store)

    def append_dataset(self, config: OffPolicyConfig) -> tuple[tuple[int, int], list[bool]]:
        """Add the episodes of ``config.dataset`` as demonstrations; return also which succeeded.

        Every rank reads the whole dataset.
        """
        store = self.replays[1]
        episodes = (
            replace(episode, records=self.algorithm.stored(episode.records))
            for episode in dataset_transitions(self.policy, config)
        )
        successes = append_all(store, episodes)
        return (store.total, len(store)), successes

    def flush(self, number: int) -> None:
        self.replays[number].flush()

    def forget_records(self, number: int, total: int) -> None:
        self.replays[number].forget(total)

    def learn(self, updates: int, iteration: int, algorithm: dict[str, Any]) -> dict[str, float]:
        """``algorithm``: the state of the driver's, which adapts it."""
        self.algorithm.restore(algorithm)
        with self.updating() as memory:
            metrics = learn_from_replay(
                self.trainer,
                self.algorithm,
                self.replays,
                updates,
                self.builders.settings.run_seed,
                iteration,
                self.progress,
            )
        return metrics | memory

    def acting_weights(self) -> Tensors:
        return self.trainer.acting_weights()
