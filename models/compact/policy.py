"""Compact policy: a shared image encoder, proprioception, and a diagonal Gaussian over actions.

Actions are in [-1, 1]. This is the usual policy for visual SAC (DrQ, Kostrikov et al. 2021), and a
baseline for PPO. Its checkpoint is a directory with config.json (sizes, and the range of each
proprioceptive dimension) and model.safetensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.distributions import Gaussian
from rlinf_vla.core.images import resized
from rlinf_vla.core.protocols import Noise, PolicySpec
from rlinf_vla.core.types import ActionEval, ActionSample, Inputs, Observation, Tensors

from .. import files
from ..config_file import read_config
from ..pretrained import PretrainedPolicy
from .encoder import ImageEncoder
from .options import CompactOptions

WORDS = 256
"""Kinds that the words of instructions are hashed to, if the policy reads them."""
_WORD = re.compile(r"[^\s_.,;]+")


class Encoder(nn.Module):
    """Encode images and state as ``width`` features per camera and ``width`` of the state, then
    ``width`` of the instruction if it is read."""

    def __init__(self, config: dict[str, Any], encoder: str, sees: bool, reads: bool) -> None:
        super().__init__()
        if sees:
            self.image = ImageEncoder(config, encoder)
        self.state = nn.Sequential(
            nn.Linear(config["state_dim"], config["width"]),
            nn.LayerNorm(config["width"]),
            nn.Tanh(),
        )
        self.words = nn.Linear(WORDS, config["width"], bias=False) if reads else None

    def forward(self, images: list[Tensor], state: Tensor, words: Tensor | None = None) -> Tensor:
        """``images``: uint8 ``[B, H, W, 3]`` each; ``state``: ``[B, S]`` in [-1, 1]; ``words``:
        uint8 ``[B, WORDS]``, how often each kind occurs."""
        parts = [*(self.image(image) for image in images), self.state(state)]
        if self.words is not None:
            assert words is not None
            parts.append(self.words(words.float()).tanh())
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Guided:
    """Features of ``CompactPolicy.guided``."""

    features: Tensor
    without: Tensor
    scale: float


class CompactPolicy(PretrainedPolicy):
    """MLP heads for the action mean and the value on the encoder's features.

    It is always built with random weights: there are too few to matter.
    """

    name: ClassVar[str] = "compact"
    sees_depth: ClassVar[bool] = True
    Config: ClassVar[type] = CompactOptions
    built_from: ClassVar[tuple[str, ...]] = (files.CONFIG,)
    lora_targets: ClassVar[tuple[str, ...]] = CompactOptions.lora_targets
    split_unsupported: ClassVar[str | None] = None
    distributions_unsupported: str | None = None

    def __init__(self, directory: Path, options: CompactOptions) -> None:
        super().__init__(directory, options)
        config = self.config = read_config(directory)
        size = tuple(config["image_sizes"])
        self.spec = PolicySpec(
            config["chunk"],
            config["action_dim"],
            config["state_dim"],
            dict.fromkeys(options.images, size),
        )
        reads = self.reads = options.reads_instruction or config.get("reads_instruction") is True
        self.condition_unsupported = (
            None if reads else "reads no instruction: set model.options.reads_instruction=true"
        )
        self.backbone = Encoder(config, options.encoder, bool(options.images), reads)
        features = config["width"] * (len(options.images) + 1 + reads)
        actions = self.spec.chunk * self.spec.action_dim
        self.head = nn.Sequential(nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, actions))
        self.log_std = nn.Parameter(
            torch.full((self.spec.chunk, self.spec.action_dim), math.log(options.std))
        )
        self.value_head = nn.Sequential(nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, 1))
        low, high = (torch.tensor(config["state_range"][name]) for name in ("low", "high"))
        if not low.shape == high.shape == (self.spec.state_dim,) or not (low < high).all():
            expected = f"{self.spec.state_dim} numbers each (state_dim), low below high"
            raise UserError(
                f"{directory / files.CONFIG}: low and high of state_range must be {expected}: copy the checkpoint again"
            )
        self.state_limit = ("state", 1.0)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    low: Tensor
    high: Tensor

    def load_weights(self, checkpoint: Path) -> None:
        """Load all weights, not the backbone's alone."""
        files.load_weights(self, files.read_weights(checkpoint), checkpoint)

    def stored_weights(self, checkpoint: Path) -> dict[str, Callable[[], Tensor]]:
        return self.readers("", files.read_weights(checkpoint), checkpoint)

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        config = self.config | {"reads_instruction": self.reads}
        files.save(self.state_dict(), config, checkpoint, {}, dtype or torch.float32)

    def prepare(self, obs: Observation) -> Inputs:
        state = (2 * (obs.state - self.low) / (self.high - self.low) - 1).clamp(-1, 1)
        return (
            {
                f"image.{name}": resized(obs.images[name], size)
                for name, size in self.spec.images.items()
            }
            | {"state": state}
            | self.prompt(obs)
        )

    def prompt(self, obs: Observation) -> Inputs:
        if not self.reads:
            return {}
        words = torch.zeros(len(obs.instruction), WORDS, dtype=torch.uint8)
        for row, instruction in enumerate(obs.instruction):
            for word in _WORD.findall(instruction.lower()):
                words[row, crc32(word.encode()) % WORDS] += 1
        return {"words": words.to(obs.state.device)}

    def encode(self, inputs: Inputs) -> Tensor:
        """Return features ``[B, F]``."""
        images = [inputs[f"image.{name}"] for name in self.spec.images]
        return self.backbone(images, inputs["state"], inputs.get("words"))

    def guided(self, features: Tensor, without: Tensor, scale: float) -> Guided:
        return Guided(features, without, scale)

    def pooled(self, features: Tensor | Guided) -> Tensor:
        return features.features if isinstance(features, Guided) else features

    def pack(self, features: Tensor) -> Tensors:
        return {"features": features}

    def unpack(self, tensors: Tensors) -> Tensor:
        return tensors["features"]

    def _distribution(self, features: Tensor | Guided, temperature: float) -> tuple[Tensor, Tensor]:
        if isinstance(features, Guided):
            without = self.head(features.without)
            flat = without + features.scale * (self.head(features.features) - without)
        else:
            flat = self.head(features)
        mean = flat.unflatten(1, (self.spec.chunk, self.spec.action_dim))
        return mean, self.log_std + math.log(temperature or 1.0)

    def act(
        self, features: Tensor | Guided, noise: Noise | None, temperature: float
    ) -> ActionSample:
        mean, log_std = self._distribution(features, temperature)
        drawn = (
            mean
            if noise is None or temperature == 0
            else mean + log_std.exp() * noise.normal(*mean.shape[1:])
        )
        return ActionSample(
            drawn.clamp(-1, 1),
            {"drawn": drawn},
            _log_prob(drawn, mean, log_std),
            self.value(features),
        )

    def evaluate(self, inputs: Inputs, latent: dict[str, Tensor], temperature: float) -> ActionEval:
        features = self.encode(inputs)
        mean, log_std = self._distribution(features, temperature)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(mean)
        return ActionEval(_log_prob(latent["drawn"], mean, log_std), entropy, self.value(features))

    def distributions(
        self, inputs: Inputs, latent: dict[str, Tensor], temperature: float
    ) -> Gaussian:
        """Return the Gaussian from which an action is drawn before it is clamped."""
        mean, log_std = self._distribution(self.encode(inputs), temperature)
        return Gaussian(mean, log_std.expand_as(mean))

    def supervised_loss(self, inputs: Inputs, actions: Tensor, noise: Noise) -> Tensor:
        mean, log_std = self._distribution(self.encode(inputs), 1.0)
        return -_log_prob(actions, mean, log_std).mean(dim=(1, 2))


def _log_prob(value: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-probability of the action before clamping."""
    return -0.5 * ((value - mean) * (-log_std).exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
