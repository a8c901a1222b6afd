"""The success classifier as a reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import RewardModel
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.models.compact.classifier import plugin
from rlinf_vla.models.compact.options import ClassifierOptions
from rlinf_vla.models.compact.success_classifier import ClassifierReward
from rlinf_vla.testing.reward import RewardConformance
from rlinf_vla.testing.toy_env import CounterWorld
from tests.rollout.test_reward_shaping import EPISODES, UP


class SeesLevel(RewardModel):
    """Success from level 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor(-0.5))

    def prepare(self, obs: Observation) -> Inputs:
        return {"level": obs.state[:, 0]}

    def forward(self, inputs: Inputs) -> Tensor:
        return inputs["level"] + self.bias


@pytest.mark.parametrize("ends", [True, False])
def test_success_is_judged_after_the_last_valid_step(ends: bool) -> None:
    env = CounterWorld(3)
    env.reset(EPISODES)
    result = env.step(UP)
    scored = ClassifierReward(SeesLevel(), 0.5, ends)(result.observation, UP, result)
    for row in range(3):
        last = int(result.valid[row].sum()) - 1
        expected = torch.zeros(4)
        expected[last] = float(result.observation.state[row, 0] >= 1)
        assert torch.equal(scored.reward[row], expected)
        assert bool(scored.terminated[row, last]) == (
            bool(result.terminated[row, last]) or (ends and bool(expected[last]))
        )
    assert scored.reward.any() and torch.equal(scored.success, result.success)


def saved(path: Path, **options: Any) -> Path:
    path.mkdir()
    torch.manual_seed(0)
    plugin.learner(ClassifierOptions(**options)).save(path)
    return path


class TestClassifier(RewardConformance):
    plugin = plugin

    @pytest.fixture
    def config(self, tmp_path: Path) -> ClassifierOptions:
        return ClassifierOptions(checkpoint=str(saved(tmp_path / "classifier")))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "reward.options.checkpoint has no value"),
        ({"checkpoint": "nowhere"}, "nowhere is no directory: give the one of a trained"),
        ({"checkpoint": "HERE", "images": ["wrist"]}, "needs image 'wrist'"),
        ({"checkpoint": "HERE", "images": ["base", "base2"]}, "base2|head"),
    ],
)
def test_an_invalid_classifier_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    directory = saved(tmp_path / "classifier")
    options = options | (
        {"checkpoint": str(directory)} if options.get("checkpoint") == "HERE" else {}
    )
    with pytest.raises(UserError, match=said) as error:
        plugin.create(ClassifierOptions(**options), CounterWorld(1).spec, torch.device("cpu"))
    assert "\n" not in str(error.value)


def test_an_image_of_another_size_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path / "classifier", image_size=32)
    with pytest.raises(UserError, match=r"needs image 'base' of \(32, 32\)"):
        plugin.create(
            ClassifierOptions(checkpoint=str(directory)), CounterWorld(1).spec, torch.device("cpu")
        )
