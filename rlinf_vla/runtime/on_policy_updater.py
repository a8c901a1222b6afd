"""On-policy update: precomputed frozen parts, proximal policy, imitation loss, minibatch epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf_vla.algorithms.on_policy import Batch, OnPolicy, OnPolicyConfig
from rlinf_vla.algorithms.parity import FLOAT32, Parity, parity_errors, unit_of
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.protocols import Policy, precompute_frozen
from rlinf_vla.core.types import Trajectory, flattened
from rlinf_vla.training.ranks import Rows, map_rows, minibatches, rows_of_rank, world_size
from rlinf_vla.training.trainer import PROXIMAL, REFERENCE, ExtraLoss, Trainer

if TYPE_CHECKING:
    from rlinf_vla.algorithms.sft import Demonstrations


class OnPolicyUpdater:
    """On-policy updates of one trainer rank."""

    shown: Demonstrations | None = None
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
            mine = rows_of_rank(parts, rows)
            batch = replace(
                batch,
                calls=replace(
                    batch.calls,
                    inputs=precompute_frozen(self.policy, batch.calls.inputs, rows, mine),
                ),
            )
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
            self._evaluated, calls, self.trainer.micro_batch_size, device_of(self.policy)
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
                self._evaluated, Rows(calls, rows), self.trainer.micro_batch_size, device, least=1
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

        assert self.shown is not None
        demonstrations, size = self.shown, config.sft_batch_size
        loss = partial(imitation_loss, noise=partial(imitation_noise, self.run_seed))

        def terms(index: int) -> list[ExtraLoss]:
            # demonstrations depend only on the minibatch's index: a resumed run draws the same ones
            batch_number = (iteration << 20) + first + index
            generator = torch.Generator().manual_seed(self.run_seed * 1_000_003 + batch_number)
            batch = demonstrations[torch.randint(len(demonstrations), (size,), generator=generator)]
            return [
                ExtraLoss(
                    replace(batch, draws=batch_number * size + torch.arange(size)),
                    loss,
                    config.sft_coef,
                )
            ]

        return terms
