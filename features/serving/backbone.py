"""Heads of split policies whose backbone a policy server runs (``rollout.backbone``)."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.policy_server import BackboneConfig
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.devices import CPU
from rlinf_vla.core.observation_messages import observation_message, raw_inputs
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Inputs, Observation, Tensors
from rlinf_vla.features.serving.array_messages import MessageError, pack, unpack
from rlinf_vla.features.serving.feature_messages import Described, read_description, read_features
from rlinf_vla.features.serving.policy_server import Connections, metadata_of, shown
from rlinf_vla.rollout.split import head_weights, load_head, require_separable, strip_to_head
from rlinf_vla.runtime.recipes import located
from rlinf_vla.training.lora import add_lora, is_lora, stored_adapter

OURS, SPLIT, ENCODE = "rlinf_vla", "split", "encode"
"""Entries of our server's metadata, and of a request for features."""
APART = ("random_weights",)
"""Options that may differ: weights are compared themselves."""


def open_head(recipe: Recipe, model: type[Policy], directory: Path, device: str) -> Policy:
    """Return the action head of the recipe's policy; its backbone is that of the server.

    The weights of the backbone in ``directory`` are read for their digest, one at a time, and kept
    nowhere, unless they are random. Raises UserError if the server cannot be reached or serves
    another model.
    """
    require_separable(model)
    options = recipe.model.options
    lora = located(recipe.model.lora)
    metadata = metadata_of(recipe.rollout.backbone)
    random = bool(getattr(options, "random_weights", False))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        policy = (
            model.load(directory, options) if random else model.without_weights(directory, options)
        )
    stored = {} if random else dict(policy.stored_weights(directory))
    with nullcontext() if random else torch.device("meta"):
        add_lora(policy, lora, recipe.seed)
    if lora.adapter is not None:
        adapter = stored_adapter(policy.backbone, Path(lora.adapter))
        stored |= {_plain(name): partial(adapter.__getitem__, name) for name in adapter}
    dtypes = {_plain(name): value.dtype for name, value in policy.state_dict().items()}
    head, parts = _divided(policy, stored, directory)
    strip_to_head(policy)
    load_head(policy, head, device)
    policy.elsewhere = RemoteBackbone(
        policy, recipe.rollout.backbone, metadata, parts, dtypes, options
    )
    return policy


def provenance(config: BackboneConfig) -> dict[str, Any]:
    """Return what the server says of its backbone, as ``Policy.provenance``. Raises UserError."""
    ours = metadata_of(config).get(OURS)
    ours = ours if isinstance(ours, dict) else {}
    policy, split = (
        section if isinstance(section := ours.get(name), dict) else {} for name in ("policy", SPLIT)
    )
    return {"backbone": split.get("backbone"), "device": policy.get("device")}


def _divided(
    policy: Policy, stored: Mapping[str, Callable[[], Tensor]], directory: Path
) -> tuple[Tensors, dict[str, str]]:
    """Return the head's weights, and the fingerprints of the others, of a whole policy.

    A weight that is not ``stored`` is the policy's own. Of adapters on meta, which would change
    nothing, the head gets zeros.
    """
    own = policy.state_dict()
    keys = {_plain(name): name for name in own}
    absent = [
        name
        for name, own_name in keys.items()
        if name not in stored and own[own_name].is_meta and not is_lora(own_name)
    ]
    if wrong := sorted(absent or stored.keys() - keys.keys()):
        raise UserError(
            f"{directory} does not fit its config.json: {wrong[0]} is {'missing' if absent else 'unexpected'}"
        )
    head: Tensors = {}
    parts: dict[str, str] = {}
    for name in [
        *stored,
        *(name for name in keys if name not in stored),
    ]:  # stored ones in the order of their files
        key = keys[name]
        value = stored[name]().to(own[key].dtype) if name in stored else own[key]
        if value.shape != own[key].shape:
            raise UserError(
                f"{directory}: {name} has shape {list(value.shape)}, config.json says {list(own[key].shape)}"
            )
        weights = head_weights(policy, {key: value})
        head |= {
            head_key: torch.zeros_like(tensor, device=CPU) if tensor.is_meta else tensor
            for head_key, tensor in weights.items()
        }
        if not weights and not value.is_meta:
            parts[name] = fingerprint(name, value)
    return head, parts


def digest_of_backbone(policy: Policy) -> str:
    """Return the SHA-256 of what a head of the policy lacks; adapters must not be merged."""
    weights = policy.state_dict()
    head = head_weights(policy, weights)
    return combined(
        {
            _plain(name): fingerprint(name, value)
            for name, value in weights.items()
            if name not in head
        }
    )


def fingerprint(name: str, weight: Tensor) -> str:
    """Return the SHA-256 of a weight; empty for factors that make an adapter change nothing."""
    if ".lora_B." in name and not weight.any():
        return ""
    total = hashlib.sha256(f"{weight.dtype} {list(weight.shape)} ".encode())
    total.update(weight.detach().to(CPU).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def combined(parts: Mapping[str, str]) -> str:
    """Return one SHA-256 of fingerprints by name, without adapters that change nothing."""
    idle = {name.replace(".lora_B.", ".lora_A.") for name, part in parts.items() if not part}
    lines = [
        f"{name} {part}\n" for name, part in sorted(parts.items()) if part and name not in idle
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _plain(name: str) -> str:
    """Return the name of a weight without what adapters insert."""
    return name.replace(".base_layer.", ".")


class RemoteBackbone:
    """Asks our server for features (``BackboneElsewhere``)."""

    def __init__(
        self,
        policy: Policy,
        config: BackboneConfig,
        metadata: dict[str, Any],
        parts: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype],
        options: Any,
    ) -> None:
        """``parts``: fingerprints of the backbone's weights. ``dtypes``: of weights in memory.

        ``options``: of the model. Raises UserError if the server serves another model.
        """
        self._policy: Any = weakref.proxy(policy)  # which has this object
        self._url = config.address
        self._parts = parts
        self._dtypes = dtypes
        self._trained: dict[str, str] = {}
        split, self._described = self._checked(metadata, policy.name, options)
        self._theirs = str(split.get("backbone"))
        self._config = config
        self._same = pack(metadata[OURS])
        self._controls = False
        self._thread = threading.local()
        self._opened = list[Connections]()
        weakref.finalize(policy, _close, self._opened)

    def _checked(
        self, metadata: dict[str, Any], model: str, options: Any
    ) -> tuple[dict[str, Any], dict[str, Described]]:
        ours = metadata.get(OURS)
        if not isinstance(ours, dict) or not isinstance(ours.get("policy"), dict):
            raise UserError(
                f"{self._url} is no server of rlinf-vla, so it has no backbone for a head: check rollout.backbone.url"
            )
        split = ours.get(SPLIT)
        served = shown(str(ours["policy"].get("model")))
        if served != model:
            raise UserError(
                f"{self._url} serves model={served}, the head here is of model={model}: choose the same on both machines"
            )
        if not isinstance(split, dict):
            raise UserError(
                f"{self._url} serves no backbone without its head: leave rollout.split out, or use model=remote"
            )
        theirs = split.get("options")
        theirs = theirs if isinstance(theirs, dict) else {}
        for name, value in unpack(pack(asdict(options))).items():
            if name not in APART and theirs.get(name) != value:
                their_value = shown(str(theirs.get(name)))
                raise UserError(
                    f"{self._url} has model.options.{name}={their_value}, here it is {value}: give both the same"
                )
        try:
            return split, read_description(split.get("features"))
        except MessageError as error:
            raise UserError(
                f"{self._url} describes its policy wrongly ({error}): the server needs another version of rlinf-vla"
            ) from None

    @property
    def digest(self) -> str:
        """SHA-256 of the backbone that the head needs."""
        return combined({**self._parts, **self._trained})

    def prepare(self, obs: Observation) -> Inputs:
        return raw_inputs(obs, self._policy.spec)

    def encode(self, inputs: Inputs) -> Tensors:
        """See ``BackboneElsewhere``. Raises UserError if the server has another backbone."""
        if (ours := self.digest) != self._theirs:
            raise UserError(
                f"{self._url} has another backbone (SHA-256 {shown(self._theirs[:12])}) than the head here was trained on ({ours[:12]}): "
                "give both machines the same model.checkpoint and checkpoint"
            )
        (answer,) = self._connections().ask([observation_message(inputs) | {ENCODE: ours}])
        try:
            return read_features(
                answer.get("features") if isinstance(answer, dict) else None,
                self._described,
                len(inputs["state"]),
            )
        except MessageError as error:
            raise Failure(f"the policy server {self._url} sends {error}") from None

    def trained(self, weights: Mapping[str, Tensor]) -> Tensors:
        head = head_weights(self._policy, weights)
        apart = {_plain(name): (name, value) for name, value in weights.items() if name not in head}
        self._trained = {
            plain_name: fingerprint(name, value.to(self._dtypes.get(plain_name, value.dtype)))
            for plain_name, (name, value) in apart.items()
        }
        return head

    def begin_control(self) -> None:
        self._controls = True

    def _connections(self) -> Connections:
        """Return the connection of this thread."""
        if not hasattr(self._thread, "connections"):
            self._thread.connections = Connections(
                self._config, 1, lambda metadata: pack(metadata.get(OURS)) == self._same
            )
            self._opened.append(self._thread.connections)
        connections: Connections = self._thread.connections
        if self._controls:
            connections.begin_control()
        return connections


def _close(opened: list[Connections]) -> None:
    for connections in opened:
        connections.close()
