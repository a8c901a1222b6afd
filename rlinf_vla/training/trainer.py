"""Take optimiser steps: epochs, minibatches, gradient accumulation, two learning rates, ranks.

Every rank gets the same batch (see ``data_parallel.py``). The policy is replicated on each rank, or
sharded over the ranks (see ``sharding.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_vla.core.types import Tensors
from rlinf_vla.training.data_parallel import Learnable, Rows, micro_batches, require_alike, sum_gradients, summed
from rlinf_vla.training.dtensors import clip_shards, gather_full, is_sharded, local_copy, local_gradient, local_shard, shard_like

_CRITIC = "value_head."
_STEP = "step"

LossFunction = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
"""Maps a network and a micro-batch to a summed loss and summed statistics. The trainer divides by
the count of the whole minibatch, so the split into micro-batches does not change the result."""


@dataclass(frozen=True)
class ExtraLoss:
    """An additional loss: the mean of ``loss`` over a separate ``batch``, times ``coefficient``."""

    batch: Any
    loss: LossFunction
    coefficient: float


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of AdamW and of gradient clipping."""

    learning_rate: float
    value_learning_rate: float
    max_grad_norm: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)


def minibatches(count: int, epochs: int, size: int, seed: int) -> list[Tensor]:
    """Return the row numbers (int64) of each minibatch; every epoch is shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    return [order[start : start + size] for order in orders for start in range(0, count, size)]


class Trainer:
    """AdamW for the trainable weights of a policy, on one process or several trainer ranks."""

    def __init__(self, policy: nn.Module, settings: OptimizerConfig, micro_batch_size: int, keep_reference: bool = False) -> None:
        """Create the optimiser for ``policy``; every trainer rank creates one.

        ``keep_reference``: copy the trainable weights now, for ``reference_weights``. Raises
        UserError if the policies of the ranks differ.
        """
        self.policy, self.settings, self.micro_batch_size = policy, settings, micro_batch_size
        self.parameters = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        self.sharded = any(map(is_sharded, self.parameters.values()))
        if not self.sharded:
            require_alike(dict(policy.named_parameters()))
        self._own = {name: local_shard(parameter) for name, parameter in self.parameters.items()}
        self._reference = self.copies() if keep_reference else None
        actor = [p for name, p in self._own.items() if not name.startswith(_CRITIC)]
        critic = [p for name, p in self._own.items() if name.startswith(_CRITIC)]
        groups = [{"params": actor, "lr": settings.learning_rate}, {"params": critic, "lr": settings.value_learning_rate}]
        self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=1e-8, weight_decay=settings.weight_decay)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Set the policy's weights to those before the first update within the context."""
        assert self._reference is not None, "create the Trainer with keep_reference=True"
        with self.swapped_weights(self._reference):
            yield

    @contextmanager
    def swapped_weights(self, weights: Tensors) -> Iterator[None]:
        """Set the trainable weights to ``weights`` (see ``copies``) within the context."""
        present = self.copies()
        try:
            self._put(weights)
            yield
        finally:
            self._put(present)

    def copies(self) -> Tensors:
        """Return copies of this rank's trainable weights, by name."""
        return {name: own.detach().clone() for name, own in self._own.items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, own in self._own.items():
            own.copy_(weights[name])

    def step(
        self, batch: Learnable, loss: LossFunction, learning_rate_scale: float = 1.0, beside: Sequence[ExtraLoss] = ()
    ) -> dict[str, float]:
        """Take one optimiser step on a minibatch, whole on every rank; return statistics.

        Statistics are means over the rows that count, identical on all ranks. ``beside``:
        additional losses. Raises FloatingPointError, with unchanged weights, if the gradient is not
        finite.
        """
        if not batch.counts.any():
            return {}
        for parameter in self.parameters.values():
            parameter.grad = None
        metrics: dict[str, float] = {}
        for term in (ExtraLoss(batch, loss, 1.0), *beside):
            metrics |= self._accumulate(term)
        norm = self._reduce()
        if not torch.isfinite(norm):
            raise FloatingPointError("the gradient is not finite: the step was not taken; lower algorithm.learning_rate")
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * learning_rate_scale
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return metrics | {"actor/grad_norm": float(norm)}

    def _accumulate(self, term: ExtraLoss) -> dict[str, float]:
        """Accumulate a term's gradient over micro-batches; return mean statistics of all ranks."""
        count, totals = int(term.batch.counts.sum()), dict[str, Tensor]()
        for part, counted in micro_batches(term.batch, self.micro_batch_size):
            value, statistics = term.loss(self.policy, part)
            (value * (term.coefficient / count if counted else 0.0)).backward()
            for name, statistic in statistics.items():
                totals[name] = totals.get(name, 0) + (statistic if counted else torch.zeros_like(statistic))
        return {name: total / count for name, total in summed(totals).items()}

    def _reduce(self) -> Tensor:
        """Sum gradients over ranks and clip them; return their norm before clipping."""
        if self.sharded:  # FSDP2 has summed them already
            for name, own in self._own.items():
                own.grad = local_gradient(self.parameters[name])
            return clip_shards(self._own.values(), self.settings.max_grad_norm)
        sum_gradients(self.parameters.values())
        return nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)

    def update(
        self,
        batch: Learnable,
        loss: LossFunction,
        epochs: int,
        minibatch_size: int,
        shuffle_seed: int,
        enough: Callable[[dict[str, float]], bool] = lambda metrics: False,
        critic_only: bool = False,
        beside: Callable[[int], Sequence[ExtraLoss]] = lambda index: (),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> dict[str, float]:
        """Train ``epochs`` passes over ``batch`` in shuffled minibatches; return mean statistics.

        Stops early when ``enough(statistics of a step)`` is true. Every rank gets the whole
        ``batch`` and reads its ``counts`` and the rows that it has ``touched`` (see
        ``data_parallel.py``). ``beside(i)``: additional losses of the ``i``-th minibatch.
        """
        sums: dict[str, float] = defaultdict(float)
        steps, parts = 0, minibatches(len(batch), epochs, minibatch_size, shuffle_seed)
        with self._frozen_actor() if critic_only else nullcontext():
            for index, rows in enumerate(parts):
                metrics = self.step(Rows(batch, rows), loss, beside=beside(index))
                steps += bool(metrics)
                for name, value in metrics.items():
                    sums[name] += value
                progress((index + 1) / len(parts))
                if metrics and enough(metrics):
                    break
        return {name: value / max(steps, 1) for name, value in sums.items()} | {"actor/updates": float(steps)}

    @contextmanager
    def _frozen_actor(self) -> Iterator[None]:
        frozen = [p for name, p in self.parameters.items() if not name.startswith(_CRITIC)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def move(self, device: torch.device | str) -> None:
        """Move optimiser state and reference weights to ``device``, after the policy."""
        for slots in self.optimizer.state.values():
            slots |= {name: value if name == _STEP else value.to(device) for name, value in slots.items()}
        if self._reference is not None:
            self._reference = {name: value.to(device) for name, value in self._reference.items()}

    def weights(self) -> Tensors:
        """Return the trainable weights by name.

        If sharded, all ranks must call it: rank 0 gets whole tensors on the CPU, the others an
        empty dict.
        """
        return gather_full({name: parameter.detach() for name, parameter in self.parameters.items()})

    def state(self) -> Tensors:
        """Return Adam's state as ``<parameter>.exp_avg`` and so on; if sharded, see ``weights``."""
        slots = {name: self.optimizer.state[own] for name, own in self._own.items() if own in self.optimizer.state}
        return gather_full(
            {
                f"{name}.{slot}": value if slot == _STEP else shard_like(self.parameters[name], value)
                for name, found in slots.items()
                for slot, value in found.items()
            }
        )

    def load_state(self, tensors: Tensors) -> None:
        """Restore what ``state`` returned on rank 0; every rank gets the whole of it."""
        for key, value in tensors.items():
            name, slot = key.rsplit(".", 1)
            self.optimizer.state[self._own[name]][slot] = value.clone() if slot == _STEP else local_copy(self.parameters[name], value)
