"""Reward from a success classifier on images (as in HIL-SERL, arXiv 2410.21845).

Its checkpoint is a directory with config.json and model.safetensors, written by
``rlinf-vla train recipe=reward_classifier``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import ImageSize, Label, Name, NonEmpty, Range
from rlinf_vla.core.images import resized
from rlinf_vla.core.protocols import EnvSpec, Reward, RewardModel, prepared
from rlinf_vla.core.types import Inputs, Observation, StepResult

from .. import files
from ..config_file import building_errors, read_config
from .encoder import ImageEncoder

SIZES = {"patch": 4, "channels": [32, 32, 32], "width": 64}


@dataclass
class ClassifierOptions:
    """Recipe node ``reward.options``."""

    checkpoint: str | None = None
    """Directory of a trained classifier; null creates a new one, to be trained."""
    image_size: ImageSize = 64
    """Side length of the input images in pixels, for a new classifier."""
    images: Annotated[list[Label], NonEmpty()] = field(default_factory=lambda: ["base"])
    """Cameras of the environment to classify from; all share one encoder."""
    encoder: Name = "conv"
    """Image encoder, from random weights: ``conv``, or ``timm:NAME`` for a backbone of timm."""
    threshold: Annotated[float, Range(0, 1, above=True, below=True)] = 0.5
    """Probability of success above which the reward is 1; otherwise it is 0."""
    ends_episode: bool = True
    """End the episode when the classifier reports success, as needed on a real robot."""


class SuccessClassifier(RewardModel):
    """Binary classifier of success from the images of one observation."""

    def __init__(self, config: dict[str, Any], options: ClassifierOptions) -> None:
        super().__init__()
        self.config = config
        self.images = dict.fromkeys(options.images, (config["image_sizes"][0], config["image_sizes"][1]))
        self.encoder = ImageEncoder(config, options.encoder)
        self.head = nn.Sequential(nn.Linear(config["width"] * len(options.images), 64), nn.ReLU(), nn.Linear(64, 1))

    def prepare(self, obs: Observation) -> Inputs:
        return {f"image.{name}": resized(obs.images[name], size) for name, size in self.images.items()}

    def forward(self, inputs: Inputs) -> Tensor:
        return self.head(torch.cat([self.encoder(inputs[f"image.{name}"]) for name in self.images], dim=1))[:, 0]

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        files.save(self, self.config, checkpoint, {}, dtype or torch.float32)


class Classifier:
    """Implements ``RewardPlugin``."""

    name = "classifier"
    Config = ClassifierOptions

    def learner(self, config: ClassifierOptions) -> SuccessClassifier:
        if config.checkpoint is None:
            return SuccessClassifier(SIZES | {"image_sizes": [config.image_size] * 2}, config)
        directory = Path(config.checkpoint).expanduser()
        with building_errors(directory, files.CONFIG):
            model = SuccessClassifier(read_config(directory), config)
        files.load_weights(model, files.read_weights(directory), directory)
        return model

    def create(self, config: ClassifierOptions, env: EnvSpec, device: torch.device) -> Reward:
        if config.checkpoint is None:
            raise UserError("reward.options.checkpoint has no value: train one with `rlinf-vla train recipe=reward_classifier`")
        model = self.learner(config)
        for name, size in model.images.items():
            if env.images.get(name) != size:
                raise UserError(f"the reward classifier needs image {name!r} of {size} pixels, the environment has {env.images}")
        return ClassifierReward(model.to(device).eval(), config.threshold, config.ends_episode)


class ClassifierReward:
    """Reward 1 in the last step of a call if the classifier reports success on its observation."""

    def __init__(self, model: RewardModel, threshold: float, ends_episode: bool) -> None:
        self.model, self.threshold, self.ends_episode = model, threshold, ends_episode

    @torch.inference_mode()
    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        seen = (self.model(prepared(self.model, result.observation)).sigmoid() > self.threshold).to(result.valid.device)
        last = result.valid & (result.valid.cumsum(1) == result.valid.sum(1, keepdim=True))
        success = last & seen[:, None]
        terminated = result.terminated | success if self.ends_episode else result.terminated
        return replace(result, reward=success.float(), terminated=terminated)


plugin = Classifier()
