"""A trainer rank: it learns from rollouts or from demonstrations.

An on-policy update computes frozen parts and the proximal policy once, and runs the minibatches of
all epochs, with the imitation loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy, OnPolicyConfig
from rlinf_vla.algorithms.parity import FLOAT32, Parity, parity_errors, unit_of
from rlinf_vla.core.devices import device_of, free_cache, measured_memory
from rlinf_vla.core.protocols import Policy, precompute_frozen
from rlinf_vla.core.types import Batched, Tensors, Trajectory, flattened
from rlinf_vla.runtime.workers.base import Builders, Worker, WorkerInfo, node_address
from rlinf_vla.runtime.workers.shards import HeavyParts, Packed, whole
from rlinf_vla.telemetry.timeline import Span, trainer_track
from rlinf_vla.training.checkpoint import begin_digests, load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import rounded_weights
from rlinf_vla.training.ranks import Rows, map_rows, minibatches, rows_of_rank, world_size
from rlinf_vla.training.trainer import PROXIMAL, REFERENCE, ExtraLoss, Trainer

if TYPE_CHECKING:
    from rlinf_vla.algorithms.classifier import Frames
    from rlinf_vla.algorithms.sft import Demonstrations
    from rlinf_vla.algorithms.value import Returns
    from rlinf_vla.runtime.ray.broadcast import Held, Order, Outbox


class OnPolicyUpdater:
    """On-policy updates of one trainer rank."""

    demonstrations: Demonstrations | None = None
    """Demonstrations for the imitation loss; required if ``sft_coef`` is not 0."""

    def __init__(
        self, trainer: Trainer, run_seed: int, temperature: float, reuse_frozen: bool
    ) -> None:
        """``reuse_frozen``: see ``ClusterConfig``."""
        self.trainer = trainer
        self.run_seed = run_seed
        self.temperature = temperature
        self.reuse_frozen = reuse_frozen
        self.policy: Policy = trainer.policy  # type: ignore[assignment]
        self.parity: Parity | None = None
        self.unit = unit_of(self.policy)
        """Unit roundoff of the network's products."""
        self._place = (-1, 0)

    def update(
        self,
        batch: Batch,
        algorithm: OnPolicy,
        value_only: bool,
        iteration: int,
        version: int,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> dict[str, float]:
        """Train on ``batch`` and return metrics. ``version``: of the policy's current weights.

        A further update in the same ``iteration`` continues the sequence of demonstration draws.
        """
        config = algorithm.config
        stale = bool((batch.calls.policy_version != version).any())
        rounded = self.unit > FLOAT32
        self._check(batch.calls, version)
        seed = self.run_seed * 1_000_003 + iteration
        rows = self.trainer.micro_batch_size
        parts = minibatches(
            len(batch), config.epochs, algorithm.minibatch_size(batch), seed, config.row_groups
        )
        first_epoch = parts[: len(parts) // config.epochs]
        if (
            self.reuse_frozen and config.epochs > 1 and not self.trainer.sharded
        ):  # a sharded policy computes on all ranks together
            division = self.trainer.division
            mine = rows_of_rank(parts, rows, division)
            with division.measured(device_of(self.policy)):
                inputs = precompute_frozen(self.policy, batch.calls.inputs, rows, mine)
            batch = replace(batch, calls=replace(batch.calls, inputs=inputs))
        first = self._place[1] if self._place[0] == iteration else 0
        if config.decoupled:
            if algorithm.keeps_proximal and not first:
                self.trainer.keep(PROXIMAL)
            # of precomputed parts, a rank has only the rows that it learns from
            by_minibatch = rounded or world_size() > 1
            with self.trainer.kept_weights(PROXIMAL) if first else nullcontext():
                proximal = (
                    self.log_prob_by(first_epoch, batch.calls)
                    if by_minibatch
                    else self.log_prob(batch.calls)
                )
            batch = replace(batch, proximal=proximal)
        elif not (value_only or first or stale) and (
            rounded if config.recompute_log_prob is None else config.recompute_log_prob
        ):
            batch = replace(
                batch,
                calls=replace(batch.calls, log_prob=self.log_prob_by(first_epoch, batch.calls)),
            )

        metrics = self.trainer.update(
            batch,
            partial(algorithm.loss, value_only=value_only),
            parts,
            enough=algorithm.enough,
            critic_only=value_only,
            learning_rate_scale=algorithm.rate,
            beside=self._cotraining(config, iteration, first)
            if config.sft_coef and not value_only
            else lambda index: (),
            progress=progress,
        )
        self._place = (iteration, first + len(parts))
        return metrics

    def reference(self, calls: Trajectory) -> Tensor:
        """Initial policy's log-probabilities ``[..., C, D]`` of ``calls`` ``[T, B]`` or ``[N]``."""
        with self.trainer.kept_weights(REFERENCE):
            return self.log_prob(flattened(calls)).reshape(calls.log_prob.shape)

    @torch.no_grad()
    def log_prob(self, calls: Trajectory) -> Tensor:
        """Log-probabilities ``[N, C, D]`` of ``calls`` ``[N]`` under the current weights."""

        return map_rows(
            self._evaluated,
            calls,
            self.trainer.micro_batch_size,
            device_of(self.policy),
            division=self.trainer.division,
        )

    @torch.no_grad()
    def log_prob_by(self, epoch: Sequence[Tensor], calls: Trajectory) -> Tensor:
        """Log-probabilities as ``log_prob``, but in the micro-batches of an epoch's minibatches.

        Rounding depends on the size of a matrix product. So these equal the ones of the first
        minibatch's loss bit for bit, and its ratio is exactly 1.
        """
        log_prob = torch.empty_like(calls.log_prob)
        device = device_of(self.policy)
        for rows in epoch:
            log_prob[rows] = map_rows(
                self._evaluated,
                Rows(calls, rows),
                self.trainer.micro_batch_size,
                device,
                least=1,
                division=self.trainer.division,
            )
        return log_prob

    def _evaluated(self, part: Trajectory) -> Tensor:
        return self.policy.evaluate(part.inputs, part.latent, self.temperature).log_prob

    def _check(self, calls: Trajectory, version: int) -> None:
        """Check ``evaluate`` once, on current weights' calls. Raises RuntimeError on mismatch."""
        if self.parity is not None or bool((calls.policy_version != version).any()):
            return
        errors = parity_errors(self.policy, calls, self.temperature)
        if len(errors):
            self.parity = Parity.of(errors, self.unit)
            self.parity.check()

    def _cotraining(
        self, config: OnPolicyConfig, iteration: int, first: int
    ) -> Callable[[int], Sequence[ExtraLoss]]:
        from rlinf_vla.algorithms.sft import imitation_loss
        from rlinf_vla.rollout.noise import imitation_noise

        assert self.demonstrations is not None
        demonstrations = self.demonstrations
        size = config.sft_batch_size
        loss = partial(imitation_loss, noise=partial(imitation_noise, self.run_seed))

        def terms(index: int) -> list[ExtraLoss]:
            # demonstrations depend only on the minibatch's index: a resumed run draws the same ones
            batch_number = (iteration << 20) + first + index
            generator = torch.Generator().manual_seed(self.run_seed * 1_000_003 + batch_number)
            batch = demonstrations.draw(size, generator)
            return [
                ExtraLoss(
                    replace(batch, draws=batch_number * size + torch.arange(size)),
                    loss,
                    config.sft_coef,
                )
            ]

        return terms


class TrainerWorker(Worker):
    """Trainer rank. Only a checkpoint can restore its trained weights and optimiser state."""

    ranks = 1

    def meeting_point(self) -> tuple[str, int]:
        """Open a store on this rank's machine, where the ranks form a process group."""
        from rlinf_vla.runtime.ray.broadcast import dist

        host = node_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def join(self, meeting_point: tuple[str, int], ranks: int) -> None:
        """Join the process group of ``ranks`` ranks. Raises UserError if it does not form."""
        from rlinf_vla.runtime.ray.process_group import join

        self.ranks = ranks
        self.store = join(
            meeting_point,
            self.place,
            ranks,
            node_address(),
            self.builders.cluster,
            None if self.place else self.store,
        )

    def ready(self) -> WorkerInfo:
        builders = self.builders
        cluster = self.builders.cluster
        with builders.update_threads():
            self.policy = builders.learner()
            if cluster.trainer_sharding == "full":
                from rlinf_vla.training.sharding import shard

                shard(self.policy)
            self.trainer = builders.trainer(self.policy)
        begin_digests(self.policy)
        self.algorithm = builders.algorithm()
        self.heavy = HeavyParts()
        weights, trained = (
            sum(parameter.numel() for parameter in group)
            for group in (self.policy.parameters(), self.trainer.parameters.values())
        )
        self.described = self.info(self.policy.spec, weights=weights, trained=trained)
        return self.described

    @cached_property
    def outbox(self) -> Outbox:
        """What broadcasts weights; its groups are formed after those of the ranks."""
        from rlinf_vla.runtime.ray.broadcast import Outbox

        return Outbox(self.builders.cluster.broadcast_device, node_address())

    @cached_property
    def learning(self) -> OnPolicyUpdater:
        return learning(self.builders, self.trainer)

    def rest(self) -> None:
        """Move the policy and the optimiser state off the GPU until there is work again."""
        self.trainer.move("cpu")
        free_cache()

    def wake(self) -> None:
        self.trainer.move(self.builders.cluster.torch_device)

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Load a checkpoint; return its state. Raises UserError if damaged or of another model."""
        return load_checkpoint(checkpoint, self.policy, self.trainer)

    def save(
        self, directory: Path, state: dict[str, Any], keep: int, earlier_weights: dict[int, Packed]
    ) -> None:
        versions = {version: packed.tensors() for version, packed in earlier_weights.items()}
        save_checkpoint(directory, self.policy, self.trainer, state, keep, versions)

    def weights(
        self, earlier: Packed | None = None, broadcast: int | None = None, split: bool = False
    ) -> tuple[Held, Packed, Packed]:
        """Return the weights that act, and with ``split`` those of the action head.

        On all ranks but the first everything is empty. ``earlier`` replaces the current weights.
        ``broadcast``: version as which a copy of what rollout workers load is kept for ``send``.
        """
        from rlinf_vla.runtime.ray.broadcast import Held

        everything = self.acting_weights() if earlier is None else earlier.tensors()
        if self.place:
            return Held(), Packed({}), Packed({})
        if self.builders.settings.rounded:
            everything = rounded_weights(self.policy, everything)
        packed = Packed.of(everything)
        head = Packed({})
        if split:
            from rlinf_vla.rollout.split import head_weights

            head = Packed.of(head_weights(self.policy, everything))
        held = Held(packed.nbytes)
        if broadcast is not None:
            own = head if split else packed
            held = Held(
                packed.nbytes, self.outbox.hold(broadcast, own.tensors()), self.outbox.address()
            )
        return held, packed, head

    def acting_weights(self) -> Tensors:
        """Return the trained weights that rollout workers load; all ranks must call it."""
        return self.trainer.weights()

    def send(self, order: Order) -> bool:
        """Broadcast the version kept by ``weights``; return whether it worked."""
        return self.outbox.send(order)

    def accept(self, serial: int, heavy: Packed) -> None:
        """Keep a shard's heavy part on this machine, which then survives its rollout worker."""
        self.heavy.add(serial, heavy)

    def forget(self, serials: Sequence[int]) -> None:
        self.heavy.forget(serials)

    def reference(self, calls: Trajectory, heavy: Packed) -> Packed:
        """Return reference log-probabilities if there is no reference worker."""
        with self.builders.update_threads():
            return Packed.of(
                {
                    "reference": self.learning.reference(whole(calls, heavy)).reshape(
                        calls.log_prob.shape
                    )
                }
            )

    @contextmanager
    def updating(self) -> Iterator[dict[str, float]]:
        """Update in the context, with its threads; yield the metrics of its memory."""
        memory = measured_memory(device_of(self.trainer.policy))
        with self.builders.update_threads(), memory as peaks:
            yield peaks

    def show(self, demonstrations: Demonstrations) -> None:
        """Set the demonstrations for the imitation loss of updates."""
        self.learning.demonstrations = demonstrations

    def step(self, batch: Batched, rate: float) -> dict[str, float]:
        """Take one optimiser step on ``batch``; return its metrics."""
        from rlinf_vla.runtime.supervised import supervised_step

        with self.updating() as memory:
            metrics = supervised_step(
                self.trainer,
                self.algorithm,
                self.builders.settings.run_seed,
                batch,
                rate,
            )
        return metrics | memory

    def predictions(self, frames: Frames | Returns) -> Tensor:
        from rlinf_vla.runtime.supervised import predictions

        with self.builders.update_threads():
            return predictions(self.trainer, self.algorithm, frames)

    def update(
        self,
        batch: Batch,
        value_only: bool,
        iteration: int,
        version: int,
        algorithm: dict[str, Any],
        shares: Sequence[float] = (),
    ) -> tuple[dict[str, float], Parity | None, float, Span]:
        """Return metrics, ``OnPolicyUpdater.parity``, this rank's rows per second of its own work,
        and the span of the update, in ``time.time``.

        ``algorithm``: the state of the driver's, which adapts it. ``shares``: see ``Division``.
        """
        started = time.time()
        self.algorithm.restore(algorithm)
        with self.updating() as memory, self.trainer.divided(shares) as division:
            batch = replace(batch, calls=self.heavy.complete(batch.calls))
            metrics = self.learning.update(
                batch, self.algorithm, value_only, iteration, version, self.progress
            )
        return (
            metrics | memory,
            self.learning.parity,
            division.speed,
            Span("update", trainer_track(self.place, self.ranks), started, time.time()),
        )


def learning(builders: Builders, trainer: Trainer) -> OnPolicyUpdater:
    """Build the ``OnPolicyUpdater`` of a worker."""
    return OnPolicyUpdater(
        trainer,
        builders.settings.run_seed,
        builders.settings.temperature,
        bool(builders.cluster.reuse_frozen),
    )
