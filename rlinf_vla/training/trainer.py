"""Take optimiser steps: epochs, minibatches, gradient accumulation, two learning rates, ranks.

Every rank gets the same batch (see ``ranks.py``). The policy is replicated on each rank, or
sharded over the ranks (see ``sharding.py``).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinf_vla.algorithms.base import CRITIC
from rlinf_vla.core.devices import CPU, device_of
from rlinf_vla.core.types import Tensors
from rlinf_vla.training import ranks

_STEP, _MASTER = "step", "master"
_TARGET = "target."
REFERENCE, PROXIMAL, AVERAGE = "reference", "proximal", "average"
"""Names of kept weights: those before the first update of the run, and of the iteration, and the
moving average of those after each step."""

LossFunction = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
"""Maps a network and a micro-batch to a summed loss and summed statistics. The trainer divides by
the count of the whole minibatch, so the split into micro-batches does not change the result."""


@dataclass(frozen=True)
class ExtraLoss:
    """An additional loss: the mean of ``loss`` over a separate ``batch``, times ``coefficient``."""

    batch: Any
    loss: LossFunction
    coefficient: float


class OptimizerSettings(Protocol):
    """What an ``Algorithm`` or an ``OptimizerConfig`` says about optimisation."""

    @property
    def max_grad_norm(self) -> float: ...
    @property
    def averaged(self) -> Sequence[str]: ...
    @property
    def ema_decay(self) -> float | None: ...
    def optimizers(self, parameters: Mapping[str, Tensor]) -> dict[str, Optimizer]: ...


class Masters:
    """The tensors that optimisers step on: float32 masters, or the weights if precise enough.

    A bfloat16 number has 8 significant bits, so a change of less than about 1/500 of a weight is
    rounded away; a step of Adam at a learning rate of 1e-5 changes hardly any weight. So the
    optimiser steps on float32 copies, as in mixed-precision training (Micikevicius et al. 2018,
    arXiv 1710.03740, section 3.1), and the policy computes with their rounding.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], own: Mapping[str, nn.Parameter]
    ) -> None:
        """``own``: this rank's pieces of ``parameters``, in the same memory."""
        self._parameters = parameters
        self._own = own
        self.low = [name for name, piece in own.items() if piece.itemsize < torch.float32.itemsize]
        """Names of the weights that have a master."""
        self.trained = dict(own) | {
            name: nn.Parameter(own[name].detach().float()) for name in self.low
        }

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within the context, backward passes add gradients to those of the masters, in float32.

        Each one is freed as soon as it is added, so the gradients are never held twice.
        """
        learning = [name for name in self.low if self._parameters[name].requires_grad]
        handles = [
            self._parameters[name].register_post_accumulate_grad_hook(
                self._add_to(self.trained[name])
            )
            for name in learning
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _add_to(master: nn.Parameter) -> Callable[[nn.Parameter], None]:
        def add(parameter: nn.Parameter) -> None:
            gradient = ranks.local_gradient(parameter)
            parameter.grad = None
            if gradient is not None:
                master.grad = (
                    gradient.float() if master.grad is None else master.grad.add_(gradient)
                )

        return add

    @torch.no_grad()
    def apply(self) -> None:
        """Round the masters into the weights."""
        for name in self.low:
            self._own[name].copy_(self.trained[name])

    @torch.no_grad()
    def reset(self) -> None:
        """Set the masters to the weights, which were loaded."""
        for name in self.low:
            self.trained[name].copy_(self._own[name])

    def move(self, device: torch.device | str) -> None:
        for name in self.low:
            self.trained[name].data = self.trained[name].data.to(device)


class Trainer:
    """Named optimisers of a network's trainable weights, in one process or on several ranks."""

    teacher: nn.Module | None = None
    """See ``algorithms.base.Trainable``."""

    def __init__(
        self,
        policy: nn.Module,
        settings: OptimizerSettings,
        micro_batch_size: int,
        keep_reference: bool = False,
    ) -> None:
        """Create the optimisers for ``policy``; every trainer rank creates one.

        ``keep_reference``: keep the trainable weights as ``REFERENCE`` now. Raises UserError if the
        policies of the ranks differ.
        """
        self.policy = policy
        self.settings = settings
        self.micro_batch_size = micro_batch_size
        self.parameters = {
            name: parameter
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad
        }
        self.division = ranks.Division()
        """How the ranks divide the rows of minibatches; see ``divided``."""
        self.sharded = any(map(ranks.is_sharded, self.parameters.values()))
        if not self.sharded:
            ranks.require_alike(dict(policy.named_parameters()))
        self._own = {
            name: ranks.local_shard(parameter) for name, parameter in self.parameters.items()
        }
        self._kept = dict[str, Tensors]()
        if keep_reference:
            self.keep(REFERENCE)
        self._masters = Masters(self.parameters, self._own)
        self.trained = self._masters.trained
        """The tensors by name that the optimisers step on, with the gradients of the last step."""
        self.low = self._masters.low
        """Names of the weights that have a float32 master (see ``Masters``)."""
        if settings.ema_decay is not None:
            self._kept[AVERAGE] = {
                name: trained.detach().to(torch.float32, copy=True)
                for name, trained in self.trained.items()
            }
        self.optimizers = settings.optimizers(self.trained)
        self.target = nn.ModuleDict(
            {name: copy.deepcopy(getattr(policy, name)) for name in settings.averaged}
        ).requires_grad_(False)
        """Moving averages of the modules that ``settings.averaged`` names."""

    def keep(self, name: str) -> None:
        """Copy the trainable weights, in place of those that were kept by this ``name``."""
        self._kept[name] = self.copies()

    def kept_weights(self, name: str) -> AbstractContextManager[None]:
        """Set the policy's weights to those that were kept by this ``name`` within the context."""
        return self.swapped_weights(self._kept[name])

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Set the policy's weights to their moving averages within the context, if there are any.

        The averages act and are exported, while steps are taken on the weights themselves.
        """
        return self.kept_weights(AVERAGE) if AVERAGE in self._kept else nullcontext()

    @contextmanager
    def swapped_weights(self, weights: Tensors) -> Iterator[None]:
        """Set the trainable weights to ``weights`` (see ``copies``) within the context, in which no
        step may be taken: optimiser state, and so master weights, stay."""
        present = self.copies()
        try:
            self._put(weights)
            yield
        finally:
            self._put(present)

    @contextmanager
    def divided(self, shares: Sequence[float]) -> Iterator[ranks.Division]:
        """Divide rows by the ranks' ``shares`` (of ``Division``) in the context. Not if sharded."""
        self.division = ranks.Division(shares)
        try:
            yield self.division
        finally:
            self.division = ranks.Division()

    def copies(self) -> Tensors:
        """Return copies of this rank's trainable weights, by name."""
        return {name: own.detach().clone() for name, own in self._own.items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, own in self._own.items():
            own.copy_(weights[name])

    def step(
        self,
        batch: ranks.Learnable,
        loss: LossFunction,
        learning_rate_scale: float = 1.0,
        beside: Sequence[ExtraLoss] = (),
    ) -> dict[str, float]:
        """Take one optimiser step on a minibatch, whole on every rank; return statistics.

        Statistics are means over the rows that count, identical on all ranks. ``beside``:
        additional losses. Raises FloatingPointError, with unchanged weights, if the gradient is not
        finite.
        """
        if not batch.counts.any():
            return {}
        for parameter in (*self.parameters.values(), *self.trained.values()):
            parameter.grad = None
        metrics: dict[str, float] = {}
        with self._masters.gathering():
            for term in (ExtraLoss(batch, loss, 1.0), *beside):
                metrics |= self._accumulate(term)
        norm = self._reduce()
        if not torch.isfinite(norm):
            raise FloatingPointError(
                "the gradient is not finite: the step was not taken; lower algorithm.learning_rate"
            )
        for optimizer in self.optimizers.values():
            rates = [group["lr"] for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate_scale
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self._masters.apply()
        self._average()
        size = float(norm)
        clipped = float(size > self.settings.max_grad_norm)
        return metrics | {"actor/grad_norm": size, "actor/clipped_steps": clipped}

    def descend(self, name: str, loss: Tensor) -> None:
        """Take a step of optimiser ``name`` down the sum of all ranks' ``loss``. Not if sharded.

        Raises FloatingPointError, with unchanged weights, if the gradient is not finite.
        """
        optimizer = self.optimizers[name]
        optimizer.zero_grad(set_to_none=True)
        with self._masters.gathering():
            loss.backward()
        ranks.sum_gradients(optimizer.param_groups[0]["params"])
        norm = nn.utils.clip_grad_norm_(
            optimizer.param_groups[0]["params"], self.settings.max_grad_norm
        )
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of the {name} is not finite: the step was not taken; lower algorithm.learning_rate"
            )
        optimizer.step()
        self._masters.apply()

    @torch.no_grad()
    def average(self, rate: float) -> None:
        """Move the averages in ``target`` towards the current weights by ``rate``."""
        for name, slow in self.target.items():
            for old, new in zip(
                slow.parameters(), getattr(self.policy, name).parameters(), strict=True
            ):
                old.lerp_(new, rate)

    @torch.no_grad()
    def _average(self) -> None:
        """Add the weights to their moving averages, in float32 and as openpi's trainer does."""
        decay = self.settings.ema_decay
        if decay is None:
            return
        for name, average in self._kept[AVERAGE].items():
            average.mul_(decay).add_(self.trained[name], alpha=1 - decay)

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' ``part``."""
        return ranks.total(part)

    def _accumulate(self, term: ExtraLoss) -> dict[str, float]:
        """Accumulate a term's gradient over micro-batches; return mean statistics of all ranks."""
        count = int(term.batch.counts.sum())
        totals = dict[str, Tensor]()
        device = device_of(self.policy)
        mine = self.division.rows_of(ranks.rank(), len(term.batch))
        with self.division.measured(device, len(mine)):
            for part, counted in ranks.micro_batches(
                term.batch, self.micro_batch_size, device, self.division
            ):
                value, statistics = term.loss(self.policy, part)
                (value * (term.coefficient / count if counted else 0.0)).backward()
                for name, statistic in statistics.items():
                    totals[name] = totals.get(name, 0) + (
                        statistic if counted else torch.zeros_like(statistic)
                    )
        return {name: total / count for name, total in ranks.summed(totals).items()}

    def _reduce(self) -> Tensor:
        """Sum gradients over ranks and clip them; return their norm before clipping."""
        if self.sharded:  # FSDP2 has summed them already
            for name in self._own.keys() - self._masters.low:
                self.trained[name].grad = ranks.local_gradient(self.parameters[name])
            return ranks.clip_shards(self.trained.values(), self.settings.max_grad_norm)
        ranks.sum_gradients(self.trained.values())
        return nn.utils.clip_grad_norm_(self.trained.values(), self.settings.max_grad_norm)

    def update(
        self,
        batch: ranks.Learnable,
        loss: LossFunction,
        minibatches: Sequence[Tensor],
        enough: Callable[[dict[str, float]], bool] = lambda metrics: False,
        critic_only: bool = False,
        learning_rate_scale: float = 1.0,
        beside: Callable[[int], Sequence[ExtraLoss]] = lambda index: (),
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> dict[str, float]:
        """Take a step on each of ``minibatches``, rows of ``batch``; return mean statistics.

        Stops early when ``enough(statistics of a step)`` is true. Every rank gets the whole
        ``batch`` and reads its ``counts`` and the rows that it has ``touched`` (see
        ``ranks.py``). ``beside(i)``: additional losses of the ``i``-th minibatch.
        """
        sums: dict[str, float] = defaultdict(float)
        steps = 0
        with self._frozen_actor() if critic_only else nullcontext():
            for index, rows in enumerate(minibatches):
                metrics = self.step(
                    ranks.Rows(batch, rows), loss, learning_rate_scale, beside(index)
                )
                steps += bool(metrics)
                for name, value in metrics.items():
                    sums[name] += value
                progress((index + 1) / len(minibatches))
                if metrics and enough(metrics):
                    break
        return {name: value / max(steps, 1) for name, value in sums.items()} | {
            "actor/updates": float(steps)
        }

    @contextmanager
    def _frozen_actor(self) -> Iterator[None]:
        frozen = [p for name, p in self.parameters.items() if not name.startswith(CRITIC)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def move(self, device: torch.device | str) -> None:
        """Move policy, optimiser state, averages and kept weights to ``device``; free gradients.

        A sharded policy cannot be called while it is not on its ranks' device, but its weights and
        state can be read.
        """
        for parameter in (*self.parameters.values(), *self.trained.values()):
            parameter.grad = None
        self.policy.to(device)
        for (
            name,
            own,
        ) in self._own.items():  # a sharded weight has moved to other memory than its piece
            own.data = ranks.local_shard(self.parameters[name]).data
        self.target.to(device)
        self._masters.move(device)
        for optimizer in self.optimizers.values():
            for slots in optimizer.state.values():
                slots |= {
                    name: value if name == _STEP and not _fused(optimizer) else value.to(device)
                    for name, value in slots.items()
                }
        for weights in self._kept.values():
            weights |= {name: value.to(device) for name, value in weights.items()}

    def spread_weights(self) -> ranks.Spread:
        """Return the trainable weights that act, by name: their moving averages if there are."""
        if AVERAGE not in self._kept:
            return ranks.Spread({name: each.detach() for name, each in self.parameters.items()})
        averages = {
            name: average.to(self.parameters[name].dtype)
            for name, average in self._kept[AVERAGE].items()
        }
        return ranks.Spread(averages, self.parameters)

    def weights(self) -> Tensors:
        """Return all of ``spread_weights``.

        If sharded, all ranks must call it: rank 0 gets whole tensors on the CPU, the others an
        empty dict.
        """
        return ranks.gather_full(self.spread_weights())

    def acting_weights(self) -> Tensors:
        """Return those of ``spread_weights`` that an actor needs, which has no critic. Not if
        sharded."""
        return {
            name: value
            for name, value in self.spread_weights().tensors.items()
            if not name.startswith(CRITIC)
        }

    def state(self) -> Tensors:
        """Return all of ``spread_state``. If sharded, see ``weights``."""
        return ranks.gather_full(self.spread_state())

    def spread_state(self) -> ranks.Spread:
        """Return Adam's state as ``<parameter>.exp_avg`` and so on, and the averages ``target.*``.

        A weight of lower precision than float32 has its float32 master as ``<parameter>.master``.
        With moving averages ``<parameter>.average``, every weight has one, because the weights of a
        checkpoint are the averages.
        """
        slots = {
            f"{name}.{slot}": value
            for name, trained in self.trained.items()
            for optimizer in self.optimizers.values()
            for slot, value in optimizer.state.get(trained, {}).items()
        }
        averages = self._kept.get(AVERAGE, {})
        for name in averages or self.low:
            slots[f"{name}.{_MASTER}"] = self.trained[name].detach()
        slots |= {f"{name}.{AVERAGE}": average for name, average in averages.items()}
        wholes = {
            key: self.parameters[key.rpartition(".")[0]]
            for key in slots
            if not key.endswith("." + _STEP)
        }
        targets = {_TARGET + name: value for name, value in self.target.state_dict().items()}
        return ranks.Spread(slots | targets, wholes)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` returned on rank 0; every rank reads the whole of it, one tensor
        after the other.

        The weights are loaded before; masters that ``tensors`` lacks become equal to them. Raises
        KeyError or RuntimeError if it belongs to another network or other optimisers.
        """
        targets = {
            key.removeprefix(_TARGET): tensors[key] for key in tensors if key.startswith(_TARGET)
        }
        self.target.load_state_dict(targets)
        for name in self._kept.get(AVERAGE, {}):
            self._kept[AVERAGE][name] = ranks.local_copy(
                self.parameters[name], tensors[f"{name}.{AVERAGE}"]
            )
        owner = {
            parameter: optimizer
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._masters.reset()
        for key in tensors:
            if key.startswith(_TARGET) or key.endswith(f".{AVERAGE}"):
                continue
            name, slot = key.rsplit(".", 1)
            trained = self.trained[name]
            value = tensors[key]
            if slot == _MASTER:
                trained.data.copy_(ranks.local_copy(self.parameters[name], value))
                continue
            if slot == _STEP:
                stored = value.to(trained.device if _fused(owner[trained]) else CPU, copy=True)
            else:
                stored = ranks.local_copy(self.parameters[name], value).to(trained.dtype)
            owner[trained].state[trained][slot] = stored
        self._masters.apply()


def _fused(optimizer: Optimizer) -> bool:
    """Return whether the optimiser counts its steps on the device of its weights."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
