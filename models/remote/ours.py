"""The server of ``rlinf-vla serve``, which describes its policy and takes a batch per request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.observation_messages import observation_message, raw_inputs
from rlinf_vla.core.protocols import KeyedNoise, Noise, PolicySpec
from rlinf_vla.core.types import MAX_TASKS, Inputs, Observation
from rlinf_vla.features.serving.array_messages import pack
from rlinf_vla.features.serving.policy_server import Connections

from .answers import checked
from .description import spec_of
from .options import NATIVE, OPENPI, RemoteOptions

OURS = "rlinf_vla"
"""Key of the metadata that only our server has."""


def is_ours(metadata: Mapping[str, Any], options: RemoteOptions) -> bool:
    """Whether the server is ours, and the options do not treat it as another project's."""
    return (
        isinstance(metadata.get(OURS), dict)
        and options.keys in (None, NATIVE)
        and options.spoken == OPENPI
    )


def provenance(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of ``Policy.provenance``."""
    description = metadata[OURS].get("policy", {})
    return {
        "sha256": description.get("sha256"),
        "device": description.get("device"),
        "server": description,
    }


class OurServer:
    """Rows of a call go in one request, with the keys of their noise."""

    def __init__(self, options: RemoteOptions, metadata: dict[str, Any]) -> None:
        """Raises UserError if the description of the policy is not valid."""
        description = metadata[OURS]
        same = pack(metadata[OURS])
        self._url = options.address
        self.spec: PolicySpec
        self.spec, self._chunk = spec_of(description.get("spec"), options)
        self._most_rows = description.get("max_batch_size")
        self.real_time_chunking = description.get("real_time_chunking") is True
        self._connections = Connections(
            options, 1, lambda new_metadata: pack(new_metadata.get(OURS)) == same
        )

    def prepare(self, obs: Observation) -> Inputs:
        return raw_inputs(obs, self.spec)

    def act(
        self,
        inputs: Inputs,
        noise: Noise | None,
        temperature: float,
        committed: Tensor | None = None,
        frozen: int = 0,
    ) -> Tensor:
        """Return float32 ``[B, C, D]``. ``committed``, ``frozen``: of ``RealTimeChunking``.

        Raises Failure, and UserError if the server takes fewer rows.
        """
        rows = len(inputs["state"])
        if type(self._most_rows) is int and rows > self._most_rows:
            most = self._most_rows
            raise UserError(
                f"{self._url} takes {most} rows of a policy call, not {rows}: set rollout.batch_size={most}, or serve more"
            )
        message = observation_message(inputs) | {"temperature": temperature}
        if noise is not None:
            message |= _keys(noise)
        if committed is not None:
            message |= {"committed": committed.numpy(), "frozen": frozen}
        (answer,) = self._connections.ask([message])
        actions = answer.get("actions") if isinstance(answer, dict) else None
        return checked(actions, self._url, (rows,), self._chunk, self.spec.action_dim)[
            :, : self.spec.chunk
        ]

    def begin_control(self) -> None:
        self._connections.begin_control()

    def close(self) -> None:
        self._connections.close()


def _keys(noise: Noise) -> dict[str, Any]:
    """Return what the server needs to draw the same numbers."""
    if not isinstance(noise, KeyedNoise):
        raise TypeError(
            f"{type(noise).__name__} has no keys, so a server cannot draw the same numbers"
        )
    keys = noise.keys
    episode = {"task": keys.task % MAX_TASKS, "seed": keys.seed, "attempt": keys.task // MAX_TASKS}
    return {
        "run_seed": keys.run_seed,
        "episode": {name: value.numpy() for name, value in episode.items()},
        "step": keys.step.numpy(),
    }
