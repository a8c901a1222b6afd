"""A policy's weights, gradients and optimiser state cut over the ranks that train it, by PyTorch's FSDP2 (``fully_shard``).

Each rank keeps one piece of every weight. A block (see ``gradient_checkpointing``) is put together when it runs, forward and backward, and
taken apart after; what stands in no block, while a method of the policy runs. torch's part is imported when used: it takes a second.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_vla.protocols import Learner
from rlinf_vla.training.gradient_checkpointing import repeated_blocks
from rlinf_vla.training.ranks import require_alike, world_size
from rlinf_vla.types import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

METHODS = ("encode", "pooled", "value", "act", "steer", "evaluate", "supervised_loss", "fix", "plain_actions")
"""Of a policy, those that compute with weights."""

OLDEST_TORCH = "2.13"
"""Before, FSDP2 did not look for tensors in dataclasses, nor keep several groups of weights per module."""


def shard(policy: Learner) -> None:
    """Cut ``policy`` over the ranks, in place. They must then call its methods together; gradients are sums over ranks.

    After LoRA and gradient checkpointing, before a Trainer is made. Raises UserError where that cannot be.
    """
    if not dist.is_initialized():
        raise UserError("cluster.trainer_sharding=full: there are no trainer ranks to cut the policy over; set it to none")
    if torch.__version__ < OLDEST_TORCH:
        raise UserError(f"cluster.trainer_sharding=full needs torch {OLDEST_TORCH}, this is {torch.__version__}")
    scalar = next((name for name, parameter in policy.named_parameters() if not parameter.ndim), None)
    if scalar is not None:
        raise UserError(f"cluster.trainer_sharding=full: {scalar} is a single number, which cannot be cut; set it to none")
    require_alike(dict(policy.named_parameters()))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(next(policy.parameters()).device.type, (world_size(),))
    place = _by_dtype(policy, mesh)
    for module in (*reversed(repeated_blocks(policy)), policy):  # from the inside out
        # taken apart after every pass, the outermost too: weights that were put elsewhere meanwhile must not be the old ones
        fully_shard(module, mesh=mesh, reshard_after_forward=True, shard_placement_fn=place)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # what is divided by is counted over all ranks already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor
    entered: list[str] = []
    for name in METHODS:
        if hasattr(policy, name):
            _gathers(policy, name, entered)
    policy.save = _cannot_save  # type: ignore[method-assign]
    # nobody writes into what a policy returns
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")


def _by_dtype(policy: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any] | None:
    """FSDP2 sums gradients of one dtype per group of weights, and makes a group per process group: so each dtype that trains (adapters in
    float32, heads in bfloat16) is given one of its own, over the same ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    dtypes = sorted({parameter.dtype for parameter in policy.parameters() if parameter.requires_grad}, key=str)
    others = {dtype: DeviceMesh.from_group(dist.new_group(), mesh.device_type) for dtype in dtypes[1:]}
    places = {dtype: ShardPlacementResult(Shard(0), FSDPMeshInfo(other, shard_mesh_dim=0)) for dtype, other in others.items()}
    return (lambda parameter: places.get(parameter.dtype)) if places else None


def _gathers(policy: nn.Module, name: str, entered: list[str]) -> None:
    """FSDP2 takes weights apart when a method ends: only the outermost may, if one calls another."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    plain = getattr(policy, name)
    register_fsdp_forward_method(policy, name)
    gathering = getattr(policy, name)

    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if entered:
            return plain(*args, **kwargs)
        entered.append(name)
        try:
            if not torch.is_inference_mode_enabled():
                return gathering(*args, **kwargs)
            # the tensors that weights are put together in are kept, and one of inference mode could not be trained with later
            with torch.inference_mode(False), torch.no_grad():
                return gathering(*args, **kwargs)
        finally:
            entered.clear()

    setattr(policy, name, call)


def _cannot_save(checkpoint: Path, dtype: torch.dtype | None = None) -> None:
    raise UserError("a sharded policy cannot write its official layout: use `rlinf-vla export` on a checkpoint of the run")


@dataclass(frozen=True)
class Footprint:
    """Bytes of training on one rank, besides activations.

    weights, gradients, optimizer: kept. buffers: what comes and goes. Sharded, that is the weights outside blocks and two blocks (one runs,
    the next one arrives); else the gradients while they are summed.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers


def footprint(policy: nn.Module, ranks: int, sharded: bool) -> Footprint:
    """Of a policy that is not sharded yet, and may be on the meta device: Adam's two moments, everything in the weights' own dtypes."""
    pieces = ranks if sharded else 1

    def kept(parameter: Tensor) -> int:
        rows = parameter.shape[0] if parameter.ndim else 1
        return math.ceil(rows / pieces) * (parameter.nbytes // rows)

    parameters = list(policy.parameters())
    gradients = sum(kept(parameter) for parameter in parameters if parameter.requires_grad)
    if sharded:
        blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in repeated_blocks(policy)]
        inside = {parameter for block in repeated_blocks(policy) for parameter in block.parameters()}
        buffers = sum(parameter.nbytes for parameter in parameters if parameter not in inside) + sum(sorted(blocks)[-2:])
    else:
        buffers = gradients if ranks > 1 else 0
    return Footprint(sum(map(kept, parameters)), gradients, 2 * gradients, buffers)
