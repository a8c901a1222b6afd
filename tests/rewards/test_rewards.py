from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.value import ValueConfig, ValueTraining
from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Reward
from rlinf_vla.core.types import StepResult
from rlinf_vla.rewards import function, success
from rlinf_vla.runtime import progress_reward
from rlinf_vla.runtime.value_models import load_value_model
from rlinf_vla.testing.reward import RewardConformance, last_valid, played
from rlinf_vla.testing.toy_env import CounterWorld
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.checkpoint import save_heads
from tests.rollout.test_reward_shaping import EPISODES, UP

MODULE = """
import torch

def halves(before, actions, result):
    return torch.where(result.valid, actions[..., 1] / 2, 0)

wrong = 3
"""


class TestSuccess(RewardConformance):
    plugin = success.plugin


class TestFunction(RewardConformance):
    plugin = function.plugin

    @pytest.fixture
    def config(self, module: str) -> function.FunctionOptions:
        return function.FunctionOptions(function=f"{module}:halves")


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of values on the toy policy, as an export has it."""
    monkeypatch.setattr(plugins, "models", lambda: {"linear": LinearPolicy})
    config = ValueConfig(demonstrations=DemonstrationConfig(dataset="data"))
    policy = ValueTraining(config).wrap(LinearPolicy(LinearOptions()), 3)
    policy.save(tmp_path)
    save_heads(policy, tmp_path)
    recipe = {
        "model": {"name": "linear", "options": {}},
        "algorithm": {"name": "value", "demonstrations": {"dataset": "data"}},
    }
    document = {"recipe": recipe, "algorithm": {"longest_episodes": {"push": 9}}}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    return tmp_path


class TestProgress(RewardConformance):
    plugin = progress_reward.plugin

    @pytest.fixture
    def config(self, values: Path) -> progress_reward.ProgressOptions:
        return progress_reward.ProgressOptions(str(values))

    def test_it_is_the_change_of_the_value_in_the_last_step(self, config: Any) -> None:
        before, actions, result = played(self.spec)
        model, training = load_value_model(config.checkpoint, "key")
        assert training.longest == {"push": 9}
        with torch.no_grad():
            change = [
                model.value(model.encode(model.prepare(seen)))
                for seen in (result.observation, before)
            ]
        found = self.create(config)(before, actions, result)
        torch.testing.assert_close(found.reward.sum(1), change[0] - change[1])
        assert not found.reward[~last_valid(result.valid)].any()
        assert torch.equal(found.terminated, result.terminated)

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"recipe": {}}, "manifest.json lacks what was trained: give"),
            (
                {"recipe": {"model": {}, "algorithm": {"name": "sft"}}},
                "trained by another algorithm",
            ),
            (
                {"recipe": {"model": {}, "algorithm": {"name": "value", "depth": 3}}},
                "written by another version of this package",
            ),
        ],
    )
    def test_another_directory_is_one_line(
        self, values: Path, changes: dict[str, Any], complaint: str
    ) -> None:
        document = json.loads((values / "manifest.json").read_text()) | changes
        (values / "manifest.json").write_text(json.dumps(document))
        with pytest.raises(UserError) as caught:
            load_value_model(str(values), "value")
        assert complaint in str(caught.value) and "\n" not in str(caught.value)


def made(name: str, **options: str) -> Reward:
    plugin = plugins.choose("reward", name, plugins.rewards())
    return plugin.create(plugin.Config(**options), CounterWorld(1).spec, torch.device("cpu"))


def step() -> StepResult:
    env = CounterWorld(3)
    env.reset(EPISODES)
    return env.step(UP)


def test_success_has_a_reward_of_one() -> None:
    result = step()
    scored = made("success")(result.observation, UP, result)
    assert (
        torch.equal(scored.reward, (result.success & result.valid).float()) and scored.reward.any()
    )
    assert torch.equal(scored.terminated, result.terminated)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rewards_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards_of_mine", raising=False)
    return "rewards_of_mine"


def test_a_users_function(module: str) -> None:
    result = step()
    scored = made("function", function=f"{module}:halves")(result.observation, UP, result)
    assert torch.equal(scored.reward, 0.5 * result.valid.float())


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("nowhere_at_all:f", "No module named"),
        ("rewards_of_mine:missing", "has no attribute"),
        ("rewards_of_mine:wrong", "not a function"),
        ("rewards_of_mine", "cannot be imported"),
        (":f", "cannot be imported"),
        ("", "cannot be imported"),
    ],
)
def test_a_missing_function(module: str, location: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        made("function", function=location)
    assert "\n" not in str(error.value)
