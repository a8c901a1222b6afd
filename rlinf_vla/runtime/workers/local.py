"""The workers of a run in this process, called directly: a pool and trainers as those on Ray.

The rollout worker acts with the trainer's own policy, of which there is no second copy. So no
weights are sent; only an earlier version is put into the policy, for the time of its rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.devices import threads
from rlinf_vla.core.protocols import Learner, Policy, VectorEnv
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.fit import remarks
from rlinf_vla.runtime.workers.base import (
    Builders,
    Progress,
    Worker,
    WorkerInfo,
    Workers,
    clock_offset,
    shifted,
)
from rlinf_vla.runtime.workers.rollout import RolloutWorker, Weights
from rlinf_vla.runtime.workers.shards import Packed
from rlinf_vla.runtime.workers.trainer import TrainerWorker
from rlinf_vla.telemetry.timeline import Span, Timeline
from rlinf_vla.training.lora import acting
from rlinf_vla.training.trainer import Trainer


class SharingRolloutWorker(RolloutWorker):
    """Acts with the policy that the trainer of this process trains."""

    def __init__(self, builders: Builders, trainer: TrainerWorker) -> None:
        super().__init__(builders, 0)
        self._trainer = trainer

    @contextmanager
    def _acting(self, weights: Weights) -> Iterator[float]:
        trainer = self._trainer.trainer
        published = (
            trainer.averaged_weights()
            if weights.everything is None
            else trainer.swapped_weights(weights.everything.tensors())
        )
        with (
            self.builders.rollout_threads(),
            published,
            acting(self.policy, self.builders.settings.rounded),
        ):
            yield 0.0

    def _spans(self, timeline: Timeline) -> list[Span]:
        """Return the spans under their own names: there is no other worker."""
        return shifted(timeline.spans(), clock_offset())


class LocalPool:
    """The rollout worker of this process."""

    role = "rollout"
    inline = True
    """A call is finished when it returns."""
    size = 1

    def __init__(self, worker: RolloutWorker, cluster: ClusterConfig) -> None:
        self.worker = worker
        self.cluster = cluster
        self.actors = [worker]

    def call(self, method: str, *arguments: Any, returns: int = 1) -> list[Any]:
        result = getattr(self.worker, method)(*arguments)
        return list(result) if returns > 1 else [result]

    def heard(self, progress: Progress) -> AbstractContextManager[None]:
        """Within the context, the worker tells its progress."""
        return heard(self.worker, progress)

    def map(self, method: str, works: Sequence[tuple[Any, ...]], progress: Progress) -> list[Any]:
        """Call ``method`` with the arguments of each of ``works``; return the results in order."""
        with heard(self.worker, progress):
            return [self.call(method, *arguments)[0] for arguments in works]

    def news(self) -> tuple[int, float]:
        """No worker is lost while this process lives."""
        return 0, 0.0


class LocalTrainers:
    """The trainer of this process, as the only rank."""

    def __init__(self, worker: TrainerWorker) -> None:
        self.worker = worker
        self.actors = [worker]

    def call(self, method: str, *arguments: Any, returns: int = 1) -> list[list[Any]]:
        result = getattr(self.worker, method)(*arguments)
        return [list(result) if returns > 1 else [result]]

    def put(self, value: Any) -> Any:
        """Return what stands for ``value`` in calls: itself."""
        return value

    def heard(self, progress: Progress) -> AbstractContextManager[None]:
        """Within the context, the trainer tells its progress."""
        return heard(self.worker, progress)

    def publisher(
        self, rollouts: LocalPool, split: bool = False, staleness: int = 0
    ) -> LocalPublisher:
        """Return what gives versions of the weights to the rollout worker."""
        return LocalPublisher(self.worker, staleness)

    def will_leave(self) -> bool:
        return False

    @property
    def worker_info(self) -> WorkerInfo:
        return self.worker.described

    def restore(self, checkpoint: Path | None) -> dict[str, Any]:
        """Load a checkpoint, if there is one; return its state. Raises UserError."""
        return {} if checkpoint is None else self.worker.restore(checkpoint)

    def save(
        self,
        directory: Path,
        state: dict[str, Any],
        keep: int,
        earlier_weights: Mapping[int, Packed] = MappingProxyType({}),
    ) -> None:
        """Write a checkpoint."""
        self.worker.save(directory, state, keep, dict(earlier_weights))


class LocalPublisher:
    """Gives each version of the weights to the rollout worker, which shares the policy."""

    def __init__(self, trainer: TrainerWorker, staleness: int = 0) -> None:
        """``staleness``: number of earlier versions whose weights are kept for a checkpoint."""
        self._trainer = trainer
        self._staleness = staleness

    def publish(
        self, version: int, earlier: Packed | None = None
    ) -> tuple[Weights, dict[str, float]]:
        """Return the trainer's present weights, or ``earlier`` ones, as a version; no metrics."""
        if earlier is None and self._staleness:
            earlier = Packed.of(self._trainer.trainer.copies())
        return Weights(version, earlier, earlier), {}


@contextmanager
def heard(worker: Worker, progress: Progress) -> Iterator[None]:
    before = worker.progress
    worker.progress = progress
    try:
        yield
    finally:
        worker.progress = before


def local_workers(
    learner: Learner,
    environments: Sequence[VectorEnv],
    rewarded: Sequence[VectorEnv],
    trainer: Trainer,
    algorithm: Any,
    settings: Settings,
    cluster: ClusterConfig,
    kind: type[TrainerWorker] = TrainerWorker,
) -> Workers:
    """Return workers around what this process has already.

    ``environments``: for evaluation; ``rewarded``: with the training's reward. ``algorithm``: an
    instance for the trainer alone. ``kind``: class of the trainer.
    """
    parts = Builders(
        learner=lambda: learner,
        head=_elsewhere,
        environments=lambda: nullcontext((environments, rewarded)),
        trainer=lambda learner: trainer,
        algorithm=lambda: algorithm,
        reward_shaper=_elsewhere,
        rewards_apart=False,
        settings=settings,
        cluster=cluster,
    )
    learning = kind(parts, 0)
    learning.ready()
    rollouts = SharingRolloutWorker(parts, learning)
    rollouts.ready()
    return Workers(LocalPool(rollouts, cluster), None, None, None, LocalTrainers(learning))


def _elsewhere(*arguments: Any) -> Any:
    raise AssertionError("only a worker of a cluster builds this")


@contextmanager
def workers_here(recipe: Recipe, say: Callable[[str], None]) -> Iterator[Workers]:
    """Start the recipe's workers in this process. Raises UserError."""
    parts = builders.recipe_builders(recipe)
    trainer = builders.trainer_class(recipe)(parts, 0)

    def learner() -> Learner:
        """Build the network only after the simulators have started."""
        trainer.ready()
        return trainer.policy

    rollouts = SharingRolloutWorker(replace(parts, learner=learner), trainer)
    if builders.needs_environments(recipe):
        say(f"starting {recipe.env.num_envs} environments ({recipe.env.name})")
    with closing(rollouts), threads(recipe.cluster.rollout_threads):
        rollouts.ready()
        for line in _remarks(recipe, rollouts, trainer.policy):
            say(line)
        pool = LocalPool(rollouts, recipe.cluster)
        yield Workers(pool, None, None, None, LocalTrainers(trainer))


def _remarks(recipe: Recipe, rollouts: SharingRolloutWorker, learner: Learner) -> list[str]:
    """Return what a user should know of how policy and environment fit, each line once."""
    if not isinstance(learner, Policy):
        return []
    lines = list(remarks(learner.spec, rollouts.groups[0].spec)) if rollouts.groups else []
    return list(dict.fromkeys([*lines, *learner.spec.remarks]))
