"""A policy in two places: its backbone at a :class:`FeatureServer`, on the trainer's GPU, its action head at a :class:`SplitActor`.

Prepared inputs cross up, packed features down, and never the backbone's weights.

A rollout worker makes its head so, and at no time holds more::

    policy = Model.without_weights(checkpoint, options)
    with torch.device("meta"):  # adapters of the backbone take no memory either
        add_lora(policy, ...)  # as the trainer did
    keep_head(policy)
    fill_head(policy, weights, device)  # head_weights(policy, policy.state_dict()) of the trainer's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlinf_vla.protocols import Policy
from rlinf_vla.rollout.actor import COUNTER, Actor, Recorded, Settings
from rlinf_vla.types import Inputs, Tensors, UserError

_BACKBONE = "backbone."


def require_separable(model: type[Policy]) -> None:
    """Raises UserError where ``rollout.split=head`` cannot be."""
    if model.inseparable is not None:
        raise UserError(f"rollout.split=head: model={model.name} {model.inseparable}; leave rollout.split out, or choose another model")


def head_weights(policy: Policy, weights: Mapping[str, Tensor]) -> Tensors:
    """Those of the ``weights`` of ``policy``, by full name, that its head needs, cut to the rows that it runs.

    Of ``policy.state_dict()`` they are what a rollout worker needs once; of what trains, what it needs after every update.
    """
    found = {name: value for name, value in weights.items() if not name.startswith(_BACKBONE) or _acts(policy, name[len(_BACKBONE) :])}
    rows = {f"{_BACKBONE}{name}": rows for name, rows in (policy.head_rows or {}).items()}
    return {name: value[rows[name]] if name in rows else value for name, value in found.items()}


def keep_head(policy: Policy) -> None:
    """Drop for good what ``prepare``, ``unpack``, ``act`` and ``value`` do not need."""
    for path, module in list(policy.backbone.named_modules()):
        for name in [*module._modules, *module._parameters]:
            full = f"{path}.{name}".removeprefix(".")
            if not _acts(policy, full) and not any(part.startswith(f"{full}.") for part in policy.head_modules):
                delattr(module, name)
    weights = dict(policy.backbone.named_parameters())
    for name, rows in (policy.head_rows or {}).items():
        if name in weights:
            module, _, last = name.rpartition(".")
            kept = torch.nn.Parameter(weights[name].detach()[rows].clone(), weights[name].requires_grad)
            setattr(policy.backbone.get_submodule(module), last, kept)


def _acts(policy: Policy, name: str) -> bool:
    return any(f"{name}.".startswith(f"{part}.") for part in policy.head_modules)


def fill_head(policy: Policy, weights: Tensors, device: torch.device | str) -> None:
    """Give a kept head copies of its weights, and move it to ``device``. Raises RuntimeError where they are not exactly its own."""
    policy.load_state_dict({name: value.to(device, copy=True) for name, value in weights.items()}, assign=True)
    policy.to(device)


def size(tensors: Tensors) -> int:
    """Bytes."""
    return sum(value.nbytes for value in tensors.values())


class FeatureServer:
    """The backbone's side. Adapters are merged, or not, by whoever calls it, as they are while rollouts play."""

    def __init__(self, policy: Policy, cuda_graphs: bool = True) -> None:
        self.policy = policy
        self._device = next(policy.parameters()).device
        graphs = self._device.type == "cuda" and cuda_graphs
        self._packed: Callable[[Tensors], Tensors] = Recorded(self._pack) if graphs else self._pack

    @torch.inference_mode()
    def encode(self, inputs: Inputs) -> Tensors:
        """Packed features of prepared ``inputs``, where these came from, each tensor dense."""
        origin = next(iter(inputs.values())).device  # (copies: see Actor._in_blocks)
        found = self._packed({name: value.to(self._device, copy=True) for name, value in inputs.items()})
        return {name: value.to(origin).contiguous() for name, value in found.items()}

    def _pack(self, inputs: Tensors) -> Tensors:
        return self.policy.pack(self.policy.encode(inputs))


class SplitActor(Actor):
    """The head's side: an :class:`Actor` whose features are fetched block by block, so that they are computed in the same shapes."""

    def __init__(self, policy: Policy, settings: Settings, encode: Callable[[Inputs], Tensors]) -> None:
        """``policy``: its head is enough. ``encode``: :meth:`FeatureServer.encode`, wherever it runs."""
        super().__init__(policy, settings)
        self._encode = encode
        self.requests = self.sent = self.received = 0
        """Blocks that were encoded so far, and the bytes of their tensors, up and down."""

    def _in_blocks(self, function: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
        return super()._in_blocks(lambda block: function(self._fetch(block)), tensors)

    def _fetch(self, block: Tensors) -> Tensors:
        """The same block with features in place of inputs."""
        counters = {name: value for name, value in block.items() if name.startswith(COUNTER)}
        inputs = {name: value for name, value in block.items() if name not in counters}
        found = self._encode(inputs)
        self.requests, self.sent, self.received = self.requests + 1, self.sent + size(inputs), self.received + size(found)
        device = next(iter(inputs.values())).device
        return {name: value.to(device, copy=True) for name, value in found.items()} | counters

    def _features(self, inputs: Tensors) -> object:
        return self.policy.unpack(inputs)
