"""Policy servers of other projects: one row a request, keys as their configurations name them.

openpi (``websocket_policy_server.py``), and the two that speak its wire with additions: vLLM-Omni
(``docs/serving/openpi_api.md``) and SGLang (``cookbook/vla/OpenPI``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core.images import padded
from rlinf_vla.core.observation_messages import as_bytes, as_text
from rlinf_vla.core.protocols import Convention, Noise, PolicySpec
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.features.serving import observation_keys
from rlinf_vla.features.serving.observation_keys import ObservationKeys
from rlinf_vla.features.serving.policy_server import Connections, shown

from ..cards import LIBERO_CONVENTION
from .answers import checked
from .options import DROID, LEROBOT, LIBERO, SGLANG, VLLM_OMNI, RemoteOptions

IMAGE_SIZE = 224
"""Side of the images that all of openpi's networks read."""


@dataclass(frozen=True)
class Meaning:
    """How a server names what a row holds, and what its numbers mean."""

    keys: ObservationKeys
    action_dim: int | None = None
    convention: Convention = Convention()  # noqa: RUF009  (frozen)
    env: Mapping[str, Any] = field(default_factory=dict)


MEANINGS = {
    LIBERO: Meaning(observation_keys.LIBERO, 7, LIBERO_CONVENTION, {"convention": "openvla"}),
    DROID: Meaning(observation_keys.DROID, 8),
    LEROBOT: Meaning(observation_keys.LEROBOT),
}


class ForeignServer:
    """A server that tells nothing of its policy: the options do."""

    real_time_chunking = False

    def __init__(self, options: RemoteOptions) -> None:
        """Raises UserError if the options leave something open."""
        self._url = options.address
        self._dialect = options.spoken
        name = options.keys or (LEROBOT if self._dialect == SGLANG else None)
        if name not in MEANINGS:
            raise UserError(
                f"{self._url} does not describe its policy, as a server of rlinf-vla does: set model.options.keys={LIBERO}, {DROID} "
                f"or {LEROBOT}, and model.options.chunk"
            )
        self._meaning = MEANINGS[name]
        self._keys = self._meaning.keys
        self._images = dict(options.images or self._keys.images)
        self.spec = self._spec(options, name)
        self._connections = Connections(options, options.connections)

    def _spec(self, options: RemoteOptions, name: str) -> PolicySpec:
        lengths = [length for length in self._keys.state.values() if length is not None]
        state_dim = (
            options.state_dim
            if options.state_dim is not None
            else sum(lengths)
            if len(lengths) == len(self._keys.state)
            else None
        )
        action_dim = options.action_dim or self._meaning.action_dim
        for option, value in (
            ("chunk", options.chunk),
            ("action_dim", action_dim),
            ("state_dim", state_dim),
        ):
            if value is None:
                raise UserError(
                    f"{self._url} does not describe its policy: set model.options.{option} (keys={name} does not say it)"
                )
        if state_dim not in (0, sum(lengths)) and len(lengths) == len(self._keys.state):
            raise UserError(
                f"model.options.state_dim={state_dim}: keys={name} has a state of {sum(lengths)} numbers: use that, or 0"
            )
        assert options.chunk is not None and action_dim is not None and state_dim is not None
        size = options.image_size or IMAGE_SIZE
        env = {**self._meaning.env, "cameras": list(self._images)}
        remark = f"{self._url} chooses how it samples: evaluation.modes and rollout.temperature do not reach it"
        return PolicySpec(
            *(
                options.chunk,
                action_dim,
                state_dim,
                dict.fromkeys(self._images, (size, size)),
                self._meaning.convention,
                env,
                (remark,),
            ),
            bars=0.5,
        )

    def prepare(self, obs: Observation) -> Inputs:
        images = {
            f"image.{name}": padded(obs.images[name], size)
            for name, size in self.spec.images.items()
        }
        return images | {
            "state": obs.state[:, : self.spec.state_dim],
            "instruction": as_bytes(obs.instruction),
        }

    def act(self, inputs: Inputs, noise: Noise | None, temperature: float) -> Tensor:
        """Return float32 ``[B, C, D]``. Raises Failure."""
        rows = len(inputs["state"])
        seeds = (
            [None] * rows
            if noise is None
            else (noise.uniform(1)[:, 0].double() * 2**31).long().tolist()
        )
        requests = [
            self._request({name: value[row] for name, value in inputs.items()}, seeds[row])
            for row in range(rows)
        ]
        answers = self._connections.ask(requests)
        spec = self.spec
        return torch.stack(
            [
                checked(self._actions(answer), self._url, (), spec.chunk, spec.action_dim)
                for answer in answers
            ]
        )

    def begin_control(self) -> None:
        self._connections.begin_control()

    def close(self) -> None:
        self._connections.close()

    def _request(self, row: Inputs, seed: int | None) -> dict[str, Any]:
        message: dict[str, Any] = {
            key: row[f"image.{camera}"].numpy() for camera, key in self._images.items()
        }
        start = 0
        for key, count in self._keys.state.items() if self.spec.state_dim else ():
            end = self.spec.state_dim if count is None else start + count
            message[key] = row["state"][start:end].numpy()
            start = end
        message[self._keys.prompt] = as_text(row["instruction"])
        if self._dialect == VLLM_OMNI:
            message |= (
                {"endpoint": "infer"} if seed is None else {"endpoint": "infer", "seed": seed}
            )
        return message

    def _actions(self, answer: Any) -> Any:
        """Return the actions in an answer: themselves, or the map's entry. Raises Failure."""
        if not isinstance(answer, dict):
            return answer
        if str(answer.get("type")) == "error" or "error" in answer:
            raise Failure(
                f"the policy server {self._url} refuses: {shown(str(answer.get('message', answer.get('error', '-'))))}"
            )
        if "actions" not in answer:
            raise Failure(
                f"the policy server {self._url} sends no actions, but {shown(', '.join(map(str, answer)) or 'an empty map')}"
            )
        return answer["actions"]
