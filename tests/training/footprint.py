"""Memory of training on one rank: the table of docs/training_ranks.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from rlinf_vla.training.gradient_checkpointing import repeated_blocks
from rlinf_vla.training.ranks import BUCKET


@dataclass(frozen=True)
class Footprint:
    """Memory of training on one rank in bytes, without activations.

    weights, gradients, optimizer: persistent. buffers: temporary. If sharded, these are the weights
    outside blocks, two blocks (one runs, the next is prefetched), and the gradients of the largest
    block, or of the weights outside blocks, packed to be summed; else the bucket of gradients
    that are summed.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers


def footprint(policy: nn.Module, ranks: int, sharded: bool) -> Footprint:
    """Return the footprint of a policy that is not yet sharded and may be on the meta device.

    Counts Adam's two moments, and masters. Gradients, moments and masters of a weight of lower
    precision are float32.
    """
    pieces = ranks if sharded else 1

    def kept(parameter: Tensor, least: int = 0) -> int:
        rows = parameter.shape[0] if parameter.ndim else 1
        return (
            math.ceil(rows / pieces) * (parameter.numel() // rows) * max(parameter.itemsize, least)
        )

    parameters = list(policy.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = sum(kept(parameter, 4) for parameter in trained)
    masters = sum(kept(parameter, 4) for parameter in trained if parameter.itemsize < 4)
    if sharded:
        blocks = [
            sum(parameter.nbytes for parameter in block.parameters())
            for block in repeated_blocks(policy)
        ]
        inside = {
            parameter for block in repeated_blocks(policy) for parameter in block.parameters()
        }
        outside = [parameter for parameter in parameters if parameter not in inside]
        groups = [outside, *(list(block.parameters()) for block in repeated_blocks(policy))]
        packed = max(
            sum(each.numel() * max(each.itemsize, 4) for each in group if each.requires_grad)
            for group in groups
        )
        buffers = sum(parameter.nbytes for parameter in outside) + sum(sorted(blocks)[-2:]) + packed
    else:
        buffers = min(gradients, BUCKET) if ranks > 1 else 0
    return Footprint(sum(map(kept, parameters)), gradients, 2 * gradients + masters, buffers)
