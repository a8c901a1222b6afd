"""Float32 master weights: Adam on weights of lower precision.

A bfloat16 number has 8 significant bits, so a change of less than about 1/500 of a weight is
rounded away; a step of Adam at a learning rate of 1e-5 changes hardly any weight. So the optimiser
steps on float32 copies, as in mixed-precision training (Micikevicius et al. 2018, arXiv 1710.03740,
section 3.1), and the policy computes with their rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlinf_vla.training.ranks import local_gradient


class Masters:
    """The tensors that optimisers step on: float32 masters, or the weights if precise enough."""

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
            gradient = local_gradient(parameter)
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

    def state(self) -> dict[str, Tensor]:
        """Return the masters by the names of their weights."""
        return {name: self.trained[name].detach() for name in self.low}
