"""Optimiser steps: epochs, minibatches, gradient accumulation, two learning rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Learnable(Protocol):
    """A batch of ``len(batch)`` items, of which ``counts`` (bool ``[N]``) says which ones have a loss."""

    @property
    def counts(self) -> Tensor: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


_CRITIC = "value_head."

BatchT = TypeVar("BatchT", bound=Learnable)

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


def _over_ranks(value: Tensor) -> float:
    """The sum of every data-parallel rank's own number; in one process, the number itself."""
    if dist.is_initialized():
        value = value.detach().clone()
        dist.all_reduce(value)
    return float(value)


class Trainer:
    def __init__(self, policy: nn.Module, settings: Optimisation, micro_batch_size: int, keep_reference: bool = False) -> None:
        """``keep_reference``: remember the weights that train as they are now, for ``reference_weights``."""
        self.policy, self.settings, self.micro_batch_size = policy, settings, micro_batch_size
        self.parameters = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        self._reference = self._copies() if keep_reference else None
        actor = [p for name, p in self.parameters.items() if not name.startswith(_CRITIC)]
        critic = [p for name, p in self.parameters.items() if name.startswith(_CRITIC)]
        groups = [{"params": actor, "lr": settings.learning_rate}, {"params": critic, "lr": settings.value_learning_rate}]
        self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=1e-8, weight_decay=settings.weight_decay)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """The policy as it was before the first update, for a while."""
        assert self._reference is not None, "keep_reference was not asked for"
        present = self._copies()
        try:
            self._put(self._reference)
            yield
        finally:
            self._put(present)

    def _copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def step(self, batch: BatchT, loss: LossFunction, learning_rate_scale: float = 1.0, beside: Sequence[Term] = ()) -> dict[str, float]:
        """One optimiser step on a minibatch; statistics are means over what counts.

        Raises FloatingPointError, with the weights as they were, where the gradient is not finite.
        """
        if not _over_ranks(batch.counts.sum()):
            return {}
        self.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, float] = {}
        for term in (Term(batch, loss, 1.0), *beside):
            metrics |= self._accumulate(term)
        self._sum_gradients()
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)
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
        count, totals = _over_ranks(term.batch.counts.sum()), dict[str, Tensor]()
        for start in range(0, len(term.batch), self.micro_batch_size):
            value, statistics = term.loss(self.policy, term.batch[start : start + self.micro_batch_size])
            (value * (term.coefficient / count)).backward()
            totals = {name: totals.get(name, 0) + statistic for name, statistic in statistics.items()}
        return {name: _over_ranks(total) / count for name, total in totals.items()}

    def _sum_gradients(self) -> None:
        """Every rank's gradients become those of the whole minibatch, whose parts the ranks hold."""
        if not dist.is_initialized():
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for parameter, summed in zip(self.parameters.values(), flat.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = summed.view_as(parameter)

    def update(
        self,
        batch: BatchT,
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

        ``beside(i)``: what the ``i``-th minibatch learns from besides.
        """
        sums: dict[str, float] = defaultdict(float)
        steps, generator = 0, torch.Generator().manual_seed(shuffle_seed)
        orders = [torch.randperm(len(batch), generator=generator) for _ in range(epochs)]
        minibatches = [order[start : start + minibatch_size] for order in orders for start in range(0, len(batch), minibatch_size)]
        with self._frozen_actor() if critic_only else nullcontext():
            for index, minibatch in enumerate(minibatches):
                metrics = self.step(batch[minibatch.to(batch.counts.device)], loss, beside=beside(index))
                steps += bool(metrics)
                for name, value in metrics.items():
                    sums[name] += value
                progress((index + 1) / len(minibatches))
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

    def state(self) -> dict[str, Tensor]:
        """Adam's state by parameter name: ``<parameter>.exp_avg`` and so on."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            f"{names[id(parameter)]}.{slot}": value for parameter, slots in self.optimizer.state.items() for slot, value in slots.items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for key, value in tensors.items():
            name, slot = key.rsplit(".", 1)
            self.optimizer.state[self.parameters[name]][slot] = value.clone()
