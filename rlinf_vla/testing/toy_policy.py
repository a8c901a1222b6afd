"""Toy policy with action chunks: a softmax over bins for each action, linear in a few pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_vla.core.distributions import Categorical
from rlinf_vla.core.protocols import Noise, Policy, PolicySpec
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation, Tensors

STRIDE = 8


@dataclass
class LinearOptions:
    """Recipe node ``model.options``. ``seed``: of the random weights."""

    chunk: int = 3
    bins: int = 5
    action_dim: int = 4
    seed: int = 0
    reads: bool = False
    """See how long the instruction is."""


class LinearPolicy(Policy):
    """The toy policy: for ``CounterWorld``, or any environment with an image ``base`` of 64
    pixels and ``action_dim`` action dimensions."""

    name: ClassVar[str] = "linear"
    Config: ClassVar[type] = LinearOptions
    lora_targets: ClassVar[tuple[str, ...]] = ("logits",)
    split_unsupported: ClassVar[str | None] = None
    head_modules: tuple[str, ...] = ("logits",)
    distributions_unsupported: str | None = None
    centres: Tensor

    def __init__(self, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        self.spec = PolicySpec(
            chunk=options.chunk,
            action_dim=options.action_dim,
            state_dim=0,
            images={"base": (64, 64)},
        )
        features = 3 * (64 // STRIDE) ** 2 + options.reads
        self.condition_unsupported = None if options.reads else "does not read instructions"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            logits = nn.Linear(features, options.chunk * self.spec.action_dim * options.bins)
            self.backbone: nn.ModuleDict = nn.ModuleDict({"logits": logits})
            self.value_head = nn.Linear(features, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.register_buffer("centres", torch.linspace(-1, 1, options.bins), persistent=False)

    @classmethod
    def without_weights(cls, checkpoint: Path, config: Any) -> LinearPolicy:
        return cls(LinearOptions(**json.loads((checkpoint / "config.json").read_text())))

    @classmethod
    def load(cls, checkpoint: Path, config: Any) -> LinearPolicy:
        """Random weights if there is only config.json."""
        policy = cls.without_weights(checkpoint, config)
        if (stored := checkpoint / "model.safetensors").exists():
            policy.backbone.load_state_dict(load_file(stored))
        return policy

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "config.json").write_text(json.dumps(asdict(self.options)))
        save_file(
            {
                name: value.to(dtype or value.dtype)
                for name, value in self.backbone.state_dict().items()
            },
            checkpoint / "model.safetensors",
        )

    def stored_weights(self, checkpoint: Path) -> dict[str, Callable[[], Tensor]]:
        stored = load_file(checkpoint / "model.safetensors")
        return {f"backbone.{name}": partial(stored.__getitem__, name) for name in stored}

    def prepare(self, obs: Observation) -> Inputs:
        image = obs.images["base"][:, ::STRIDE, ::STRIDE].contiguous()
        return {"image": image} | (self.prompt(obs) if self.options.reads else {})

    def prompt(self, obs: Observation) -> Inputs:
        lengths = torch.tensor([[len(text)] for text in obs.instruction])
        return {"length": lengths.to(obs.state.device)}

    def encode(self, inputs: Inputs) -> Tensor:
        seen = inputs["image"].flatten(1).float() / 255 - 0.5
        if not self.options.reads:
            return seen
        return torch.cat([seen, inputs["length"].float() / 64 - 0.5], dim=1)

    def guided(self, features: Tensor, without: Tensor, scale: float) -> Tensor:
        """The logits are linear in the features."""
        return without + scale * (features - without)

    def pooled(self, features: Tensor) -> Tensor:
        return features

    def pack(self, features: Tensor) -> Tensors:
        return {"features": features}

    def unpack(self, tensors: Tensors) -> Tensor:
        return tensors["features"]

    def act(self, features: Tensor, noise: Noise | None, temperature: float) -> ActionSample:
        log_prob = self._log_softmax(features, temperature)
        scores = log_prob
        if noise is not None and temperature > 0:
            scores = log_prob - torch.log(-torch.log(noise.uniform(*log_prob.shape[1:])))
        choice = scores.argmax(-1)
        return ActionSample(
            actions=self.centres[choice],
            latent={"choice": choice},
            log_prob=log_prob.gather(-1, choice[..., None])[..., 0],
            value=self.value(features),
        )

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        features = self.encode(inputs)
        log_prob = self._log_softmax(features, temperature)
        return ActionEval(
            log_prob=log_prob.gather(-1, latent["choice"][..., None])[..., 0],
            entropy=-(log_prob.exp() * log_prob).sum(-1),
            value=self.value(features),
        )

    def distributions(
        self, inputs: Inputs, latent: dict[str, Tensor], temperature: float
    ) -> Categorical:
        log_prob = self._log_softmax(self.encode(inputs), temperature)
        return Categorical(log_prob, self.centres[:, None].expand(-1, self.spec.action_dim))

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        choice = (actions[..., None] - self.centres).abs().argmin(-1)
        return -self.evaluate(inputs, {"choice": choice}, temperature=1.0).log_prob.mean((1, 2))

    def _log_softmax(self, features: Tensor, temperature: float) -> Tensor:
        logits = self.backbone["logits"](features).reshape(
            len(features), self.spec.chunk, self.spec.action_dim, -1
        )
        return torch.log_softmax(logits / (temperature or 1.0), dim=-1)
