"""Shard weights, gradients and optimiser state over trainer ranks with FSDP2 (``fully_shard``).

Each rank keeps one piece of every weight. The weights of a block (see ``gradient_checkpointing``)
are gathered while it runs, forward and backward; those outside blocks, while a method of the policy
runs. FSDP2 is imported on first use, because the import takes a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.protocols import Learner
from rlinf_vla.training.gradient_checkpointing import repeated_blocks
from rlinf_vla.training.ranks import require_alike, world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

METHODS = (
    "encode",
    "pooled",
    "value",
    "act",
    "act_from_noise",
    "evaluate",
    "supervised_loss",
    "precompute",
    "reference_actions",
)
"""The methods of a policy that compute with weights."""

OLDEST_TORCH = "2.13"
"""Older FSDP2 finds no tensors in dataclasses and supports one weight group per module."""


def shard(policy: Learner) -> None:
    """Shard ``policy`` over the ranks, in place; then all ranks must call its methods together.

    Gradients are sums over ranks, at least in float32. Call it after LoRA and gradient
    checkpointing, before creating a Trainer. Raises UserError if the policy cannot be sharded.
    """
    if not dist.is_initialized():
        raise UserError(
            "cluster.trainer_sharding=full: there are no trainer ranks to shard the policy over; set it to none"
        )
    if torch.__version__ < OLDEST_TORCH:
        raise UserError(
            f"cluster.trainer_sharding=full needs torch {OLDEST_TORCH}, this is {torch.__version__}"
        )
    scalar = next(
        (name for name, parameter in policy.named_parameters() if not parameter.ndim), None
    )
    if scalar is not None:
        raise UserError(
            f"cluster.trainer_sharding=full: {scalar} is a scalar, which cannot be sharded; set it to none"
        )
    require_alike(dict(policy.named_parameters()))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device_of(policy).type, (world_size(),))
    placement = _by_dtype(policy, mesh)
    # sums over ranks in bfloat16 would be rounded once per rank
    precision = MixedPrecisionPolicy(
        reduce_dtype=reduce(torch.promote_types, _trained_dtypes(policy), torch.float32)
    )
    for module in (*reversed(repeated_blocks(policy)), policy):  # from the inside out
        # reshard even the outermost module after a pass: weights may be replaced between passes
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            shard_placement_fn=placement,
            mp_policy=precision,
        )
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(
                1.0
            )  # losses are already divided by counts over all ranks
            module.set_force_sum_reduction_for_comms(
                True
            )  # gloo supports no other reduction with a factor
    entered: list[str] = []
    for name in METHODS:
        if hasattr(policy, name):
            _gathers(policy, name, entered)
    policy.save = _cannot_save  # type: ignore[method-assign]
    # no caller writes into tensors that a policy returns
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")


def _by_dtype(policy: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any] | None:
    """Return a placement that gives each trained dtype a separate process group over all ranks.
    FSDP2 reduces gradients of one dtype per weight group, and has one weight group per process
    group; adapters train in float32, heads perhaps in bfloat16. None if there is only one dtype."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    others = {
        dtype: DeviceMesh.from_group(dist.new_group(), mesh.device_type)
        for dtype in _trained_dtypes(policy)[1:]
    }
    places = {
        dtype: ShardPlacementResult(Shard(0), FSDPMeshInfo(other, shard_mesh_dim=0))
        for dtype, other in others.items()
    }
    return (lambda parameter: places.get(parameter.dtype)) if places else None


def _trained_dtypes(policy: nn.Module) -> list[torch.dtype]:
    """Return the dtypes of trained weights, in the same order on all ranks."""
    return sorted(
        {parameter.dtype for parameter in policy.parameters() if parameter.requires_grad}, key=str
    )


def _gathers(policy: nn.Module, name: str, entered: list[str]) -> None:
    """Make method ``name`` gather weights. FSDP2 reshards when a method ends, so only the outermost
    of nested calls may do it."""
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
            # FSDP2 reuses the tensors of gathered weights, and inference tensors cannot be trained
            with torch.inference_mode(False), torch.no_grad():
                return gathering(*args, **kwargs)
        finally:
            entered.clear()

    setattr(policy, name, call)


def _cannot_save(checkpoint: Path, dtype: torch.dtype | None = None) -> None:
    raise UserError(
        "a sharded policy cannot write its official layout: use `rlinf-vla export` on a checkpoint of the run"
    )
