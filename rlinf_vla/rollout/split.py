"""Split a policy: its backbone in a :class:`FeatureServer`, its head in an :class:`Actor`.

The backbone runs on the trainer's GPU. Prepared inputs are sent to it and packed features back, but
never the backbone's weights. A rollout worker builds its head without ever holding more::

    policy = Model.without_weights(checkpoint, options)
    with torch.device("meta"):  # adapters of the backbone take no memory either
        add_lora(policy, ...)  # as the trainer did
    strip_to_head(policy)
    load_head(policy, weights, device)  # head_weights(policy, policy.state_dict()) of the trainer's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, device_of, moved
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Inputs, Tensors
from rlinf_vla.rollout.actor import RECORDERS, Recorder

_BACKBONE = "backbone."


def require_separable(model: type[Policy]) -> None:
    """Raises UserError if the model does not support ``rollout.split=head``."""
    if model.split_unsupported is not None:
        raise UserError(
            f"rollout.split=head: model={model.name} {model.split_unsupported}; leave rollout.split out, or choose another model"
        )


def head_weights(policy: Policy, weights: Mapping[str, Tensor]) -> Tensors:
    """Select the ``weights`` that the policy's head needs, by full name, cut to the rows it uses.

    A rollout worker needs those of ``policy.state_dict()`` once, and those of the trainable weights
    after every update.
    """
    result = {
        name: value
        for name, value in weights.items()
        if not name.startswith(_BACKBONE) or _acts(policy, name[len(_BACKBONE) :])
    }
    rows = {f"{_BACKBONE}{name}": rows for name, rows in (policy.head_rows or {}).items()}
    return {name: value[rows[name]] if name in rows else value for name, value in result.items()}


def strip_to_head(policy: Policy) -> None:
    """Delete all weights that ``prepare``, ``unpack``, ``act`` and ``value`` do not need."""
    for path, module in list(policy.backbone.named_modules()):
        for name in [*module._modules, *module._parameters]:
            full = f"{path}.{name}".removeprefix(".")
            if not _acts(policy, full) and not any(
                part.startswith(f"{full}.") for part in policy.head_modules
            ):
                delattr(module, name)
    weights = dict(policy.backbone.named_parameters())
    for name, rows in (policy.head_rows or {}).items():
        if name in weights:
            module, _, last = name.rpartition(".")
            parameter = torch.nn.Parameter(
                weights[name].detach()[rows].clone(), weights[name].requires_grad
            )
            setattr(policy.backbone.get_submodule(module), last, parameter)


def _acts(policy: Policy, name: str) -> bool:
    return any(f"{name}.".startswith(f"{part}.") for part in policy.head_modules)


def load_head(policy: Policy, weights: Tensors, device: torch.device | str) -> None:
    """Copy weights into a kept head on ``device``. Raises RuntimeError if they do not match."""
    policy.load_state_dict(
        {name: value.to(device, copy=True) for name, value in weights.items()}, assign=True
    )
    policy.to(device)


class FeatureServer:
    """Run the backbone. The caller decides whether adapters are merged, as during rollouts."""

    def __init__(self, policy: Policy, cuda_graphs: bool = True) -> None:
        self.policy = policy
        self._device = device_of(policy)
        self._packed: Callable[[Tensors], Tensors] = self._pack
        if cuda_graphs and self._device.type in RECORDERS:
            self.record(RECORDERS[self._device.type])

    def record(self, recorder: Recorder) -> None:
        """Encode from now on through a ``recorder``, such as CudaGraphed."""
        self._packed = recorder(self._pack)

    def forget(self) -> None:
        """Encode directly again, and free the memory of recordings."""
        self._packed = self._pack

    @torch.inference_mode()
    def encode(self, inputs: Inputs) -> Tensors:
        """Return packed features of prepared ``inputs``, contiguous, on the CPU."""
        copies = {
            name: value.clone() for name, value in moved(inputs, self._device).items()
        }  # see Actor._in_blocks
        features = moved(self._packed(copies), CPU)
        return {name: value.contiguous() for name, value in features.items()}

    def _pack(self, inputs: Tensors) -> Tensors:
        return self.policy.pack(self.policy.encode(inputs))
