"""A policy on a server: it acts, and never learns.

``act`` is one request per call to our own server (``ours``), which then computes what the policy
would compute here, bit for bit; other servers (``foreign``) get one per row.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.observation_messages import as_bytes
from rlinf_vla.core.protocols import Noise, Policy, PolicySpec
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation
from rlinf_vla.features.serving.policy_server import metadata_of

from . import ours
from .foreign import ForeignServer
from .options import RemoteOptions


class Server(Protocol):
    """A policy server, ours or another project's."""

    spec: PolicySpec
    real_time_chunking: bool

    def prepare(self, obs: Observation) -> Inputs: ...
    def act(self, inputs: Inputs, noise: Noise | None, temperature: float) -> Tensor: ...
    def begin_control(self) -> None: ...
    def close(self) -> None: ...


class RemotePolicy(Policy):
    """Log-probabilities and values are NaN: servers do not tell them."""

    name: ClassVar[str] = "remote"
    Config: ClassVar[type] = RemoteOptions
    learns: ClassVar[bool] = False
    lora_targets: ClassVar[tuple[str, ...]] = RemoteOptions.lora_targets
    split_unsupported: ClassVar[str | None] = "has its weights on a server"

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.spec = server.spec
        self.backbone = nn.Identity()
        self.value_head = nn.Identity()
        weakref.finalize(self, server.close)

    @classmethod
    def load(cls, checkpoint: Path, config: RemoteOptions) -> RemotePolicy:
        """Ask the server for the sizes of its policy; it is connected to again when it acts.

        Raises UserError if there is no server, or its answer and the options leave something open.
        """
        metadata = metadata_of(config)
        server = (
            ours.OurServer(config, metadata)
            if ours.is_ours(metadata, config)
            else ForeignServer(config)
        )
        return RemoteFlowPolicy(server) if server.real_time_chunking else cls(server)

    @classmethod
    def provenance(cls, config: RemoteOptions) -> dict[str, Any]:
        metadata = metadata_of(config)
        return (
            ours.provenance(metadata)
            if ours.is_ours(metadata, config)
            else {"sha256": None, "device": None}
        )

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        as_bytes(list(instructions))

    def prepare(self, obs: Observation) -> Inputs:
        return self.server.prepare(obs)

    def encode(self, inputs: Inputs) -> Inputs:
        """Return the inputs: the server encodes them."""
        return inputs

    def act(self, features: Inputs, noise: Noise | None, temperature: float) -> ActionSample:
        """Raises Failure if the server does not answer with the actions of ``spec``."""
        return _sample(self.server.act(features, noise, temperature))

    def begin_control(self) -> None:
        self.server.begin_control()

    def value(self, features: Inputs) -> Tensor:
        return torch.full((len(features["state"]),), torch.nan)

    def pooled(self, features: Any) -> Tensor:
        _refuse()

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        _refuse()

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        _refuse()

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        _refuse()


class RemoteFlowPolicy(RemotePolicy):
    """A policy on a server that continues committed actions (``RealTimeChunking``)."""

    def act_with_prefix(
        self,
        features: Inputs,
        noise: Noise | None,
        temperature: float,
        committed: Tensor,
        frozen: int,
    ) -> ActionSample:
        assert isinstance(self.server, ours.OurServer)
        return _sample(self.server.act(features, noise, temperature, committed, frozen))


def _sample(actions: Tensor) -> ActionSample:
    unknown = torch.full_like(actions, torch.nan)
    return ActionSample(actions, {}, unknown, unknown[:, 0, 0])


def _refuse() -> NoReturn:
    raise UserError(
        "model=remote: its weights are on a server, so it cannot learn, nor be saved: choose the model itself"
    )
