"""A run goes on after episodes that a fault cut: they are said, counted and listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.core.types import FAULTS, REWARD_FAULT, Observation, StepResult
from tests.cli.conftest import CommandLine, Counting


def undefined_in_the_first(before: Observation, actions: Tensor, result: StepResult) -> Tensor:
    """A reward that one of the environments never has."""
    reward = result.reward.clone()
    reward[0] = torch.nan
    return reward


@pytest.mark.parametrize("recipe", ["counting_ppo", "counting_sac"])
def test_a_reward_that_is_not_a_number(
    rlinf_vla: CommandLine, counting: Counting, recipe: str
) -> None:
    function = f"reward.options.function={__name__}:{undefined_in_the_first.__name__}"
    words = ("run_dir=run", "evaluation.before_and_after=false", "reward=function", function)
    done = rlinf_vla(*counting.arguments("train", recipe, *words))
    assert done.code == 0, done.err
    assert f"an episode was cut: {FAULTS[REWARD_FAULT]} in step" in done.out
    listed = [json.loads(line) for line in Path("run/faults.jsonl").read_text().splitlines()]
    counted = [
        json.loads(line).get("faults/episodes", 0)
        for line in Path("run/metrics.jsonl").read_text().splitlines()
    ]
    assert len(listed) == sum(counted) > 0
    assert {each["reason"] for each in listed} == {FAULTS[REWARD_FAULT]}
    assert [each["iteration"] for each in listed] == sorted(each["iteration"] for each in listed)
