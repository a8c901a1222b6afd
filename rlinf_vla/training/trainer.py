"""Optimiser steps: epochs, minibatches, gradient accumulation, two learning rates; by one process, or by ranks that share the rows.

Every rank is given the same batch (see ``ranks.py``). The policy is a whole one on each, or cut over them (see ``sharding.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_vla.training.pieces import clip_pieces, gathered, is_sharded, own_copy, own_gradient, own_piece, piece_of
from rlinf_vla.training.ranks import Learnable, Rows, require_alike, shares, sum_gradients, summed
from rlinf_vla.types import Tensors

_CRITIC = "value_head."
_STEP = "step"

LossFunction = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
"""Of what learns and a micro-batch, its summed loss and summed statistics: divided by the whole minibatch's count, so that its cuts
change nothing."""


@dataclass(frozen=True)
class Term:
    """A loss beside the main one: the mean of ``loss`` over its own ``batch``, times ``coefficient``."""

    batch: Any
    loss: LossFunction
    coefficient: float


@dataclass(frozen=True)
class Optimisation:
    learning_rate: float
    value_learning_rate: float
    max_grad_norm: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)


def minibatches(count: int, epochs: int, size: int, seed: int) -> list[Tensor]:
    """The row numbers (int64) that each step of an update learns from: every epoch in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    return [order[start : start + size] for order in orders for start in range(0, count, size)]


class Trainer:
    def __init__(self, policy: nn.Module, settings: Optimisation, micro_batch_size: int, keep_reference: bool = False) -> None:
        """``keep_reference``: remember the weights that train as they are now, for ``reference_weights``.

        Of ranks that train together each makes one. Raises UserError where their policies differ.
        """
        self.policy, self.settings, self.micro_batch_size = policy, settings, micro_batch_size
        self.parameters = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        self.sharded = any(map(is_sharded, self.parameters.values()))
        if not self.sharded:
            require_alike(dict(policy.named_parameters()))
        self._own = {name: own_piece(parameter) for name, parameter in self.parameters.items()}
        self._reference = self.copies() if keep_reference else None
        actor = [p for name, p in self._own.items() if not name.startswith(_CRITIC)]
        critic = [p for name, p in self._own.items() if name.startswith(_CRITIC)]
        groups = [{"params": actor, "lr": settings.learning_rate}, {"params": critic, "lr": settings.value_learning_rate}]
        self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=1e-8, weight_decay=settings.weight_decay)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """The policy as it was before the first update, for a while."""
        assert self._reference is not None, "keep_reference was not asked for"
        with self.other_weights(self._reference):
            yield

    @contextmanager
    def other_weights(self, weights: Tensors) -> Iterator[None]:
        """Those that were once ``copies``, for a while."""
        present = self.copies()
        try:
            self._put(weights)
            yield
        finally:
            self._put(present)

    def copies(self) -> Tensors:
        """Of what trains, this rank's own."""
        return {name: own.detach().clone() for name, own in self._own.items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, own in self._own.items():
            own.copy_(weights[name])

    def step(self, batch: Learnable, loss: LossFunction, learning_rate_scale: float = 1.0, beside: Sequence[Term] = ()) -> dict[str, float]:
        """One optimiser step on a minibatch, of which every rank is given the whole; statistics are means over what counts, on all ranks
        the same.

        Raises FloatingPointError, with the weights as they were, where the gradient is not finite.
        """
        if not batch.counts.any():
            return {}
        for parameter in self.parameters.values():
            parameter.grad = None
        metrics: dict[str, float] = {}
        for term in (Term(batch, loss, 1.0), *beside):
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

    def _accumulate(self, term: Term) -> dict[str, float]:
        """Add a term's gradient, micro-batch by micro-batch; its statistics. What is divided by is counted over all ranks."""
        count, totals = int(term.batch.counts.sum()), dict[str, Tensor]()
        for part, counted in shares(term.batch, self.micro_batch_size):
            value, statistics = term.loss(self.policy, part)
            (value * (term.coefficient / count if counted else 0.0)).backward()
            for name, statistic in statistics.items():
                totals[name] = totals.get(name, 0) + (statistic if counted else torch.zeros_like(statistic))
        return {name: total / count for name, total in summed(totals).items()}

    def _reduce(self) -> Tensor:
        """Gradients of the whole minibatch, clipped; returns their norm before."""
        if self.sharded:  # they are sums already
            for name, own in self._own.items():
                own.grad = own_gradient(self.parameters[name])
            return clip_pieces(self._own.values(), self.settings.max_grad_norm)
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
        beside: Callable[[int], Sequence[Term]] = lambda index: (),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> dict[str, float]:
        """``epochs`` passes over ``batch`` in minibatches, each pass in an order of its own; ends early when ``enough`` says so.

        Every rank is given the whole ``batch``, of which it reads ``counts``, and the rows that it has ``touched`` (see ``ranks.py``).
        ``beside(i)``: what the ``i``-th minibatch learns from besides.
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
        """What is kept beside the policy, which has been moved."""
        for slots in self.optimizer.state.values():
            slots |= {name: value if name == _STEP else value.to(device) for name, value in slots.items()}
        if self._reference is not None:
            self._reference = {name: value.to(device) for name, value in self._reference.items()}

    def weights(self) -> Tensors:
        """What trains, by name. Where it is sharded every rank must ask; rank 0 is given whole tensors on the CPU, the others none."""
        return gathered({name: parameter.detach() for name, parameter in self.parameters.items()})

    def state(self) -> Tensors:
        """Adam's state by parameter name, ``<parameter>.exp_avg`` and so on; asked for and given as ``weights``."""
        slots = {name: self.optimizer.state[own] for name, own in self._own.items() if own in self.optimizer.state}
        return gathered(
            {
                f"{name}.{slot}": value if slot == _STEP else piece_of(self.parameters[name], value)
                for name, found in slots.items()
                for slot, value in found.items()
            }
        )

    def load_state(self, tensors: Tensors) -> None:
        """What ``state`` gave, on every rank."""
        for key, value in tensors.items():
            name, slot = key.rsplit(".", 1)
            self.optimizer.state[self._own[name]][slot] = value.clone() if slot == _STEP else own_copy(self.parameters[name], value)
