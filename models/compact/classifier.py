"""Reward from a success classifier on images (as in HIL-SERL, arXiv 2410.21845).

Its checkpoint is a directory with config.json and model.safetensors, written by
``rlinf-vla train recipe=reward_classifier``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_vla.config.errors import UserError

from .options import ClassifierOptions

if TYPE_CHECKING:
    import torch

    from rlinf_vla.core.protocols import EnvSpec, Reward

    from .success_classifier import SuccessClassifier

SIZES = {"patch": 4, "channels": [32, 32, 32], "width": 64}


class Classifier:
    """Implements ``RewardPlugin``."""

    name = "classifier"
    Config = ClassifierOptions

    def learner(self, config: ClassifierOptions) -> SuccessClassifier:
        from .. import files
        from ..config_file import building_errors, read_config
        from .success_classifier import SuccessClassifier

        if config.checkpoint is None:
            return SuccessClassifier(SIZES | {"image_sizes": [config.image_size] * 2}, config)
        directory = Path(config.checkpoint).expanduser()
        with building_errors(directory, files.CONFIG):
            model = SuccessClassifier(read_config(directory), config)
        files.load_weights(model, files.read_weights(directory), directory)
        return model

    def check(self, config: ClassifierOptions) -> None:
        if config.checkpoint is None:
            raise UserError(
                "reward.options.checkpoint has no value: train one with `rlinf-vla train recipe=reward_classifier`"
            )
        if not Path(config.checkpoint).expanduser().is_dir():
            raise UserError(
                f"reward.options.checkpoint={config.checkpoint} is no directory: give the one of a trained classifier"
            )

    def create(self, config: ClassifierOptions, env: EnvSpec, device: torch.device) -> Reward:
        from .success_classifier import ClassifierReward

        self.check(config)
        model = self.learner(config)
        for name, size in model.images.items():
            if env.images.get(name) != size:
                raise UserError(
                    f"the reward classifier needs image {name!r} of {size} pixels, the environment has {env.images}"
                )
        return ClassifierReward(model.to(device).eval(), config.threshold, config.ends_episode)


plugin = Classifier()
