from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Reward
from rlinf_vla.core.types import StepResult
from rlinf_vla.rewards import function, success
from rlinf_vla.testing.reward import RewardConformance
from rlinf_vla.testing.toy_env import CounterWorld
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
