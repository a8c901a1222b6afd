"""The network of the success classifier, and the reward that it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_vla.core.images import resized
from rlinf_vla.core.protocols import RewardModel, prepared
from rlinf_vla.core.types import Inputs, Observation, StepResult, last_true

from .. import files
from .encoder import ImageEncoder
from .options import ClassifierOptions


class SuccessClassifier(RewardModel):
    """Binary classifier of success from the images of one observation."""

    def __init__(self, config: dict[str, Any], options: ClassifierOptions) -> None:
        super().__init__()
        self.config = config
        self.images = dict.fromkeys(
            options.images, (config["image_sizes"][0], config["image_sizes"][1])
        )
        self.encoder = ImageEncoder(config, options.encoder)
        self.head = nn.Sequential(
            nn.Linear(config["width"] * len(options.images), 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def prepare(self, obs: Observation) -> Inputs:
        return {
            f"image.{name}": resized(obs.images[name], size) for name, size in self.images.items()
        }

    def forward(self, inputs: Inputs) -> Tensor:
        return self.head(
            torch.cat([self.encoder(inputs[f"image.{name}"]) for name in self.images], dim=1)
        )[:, 0]

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        files.save(self.state_dict(), self.config, checkpoint, {}, dtype or torch.float32)


class ClassifierReward:
    """Reward 1 in the last step of a call if the classifier reports success on its observation."""

    def __init__(self, model: RewardModel, threshold: float, ends_episode: bool) -> None:
        self.model = model
        self.threshold = threshold
        self.ends_episode = ends_episode

    @torch.inference_mode()
    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        seen = (self.model(prepared(self.model, result.observation)).sigmoid() > self.threshold).to(
            result.valid.device
        )
        success = last_true(result.valid) & seen[:, None]
        terminated = result.terminated | success if self.ends_episode else result.terminated
        return replace(result, reward=success.float(), terminated=terminated)
