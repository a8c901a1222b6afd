"""Limits on a simulator's actions, against a plain loop over single actions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LimitsConfig
from rlinf_vla.core.protocols import EnvSpec, ToolUnits, VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult
from rlinf_vla.rollout.deadline import Deadline, DeadlineEnv
from rlinf_vla.rollout.safety_limits import LimitedEnv, limited

UNIT_M = 0.1
TOOL = ToolUnits(UNIT_M)
BOX = [-0.1, -0.15, 0.0, 0.2, 0.15, 0.3]


def plain(
    action: list[float], tool: list[float], config: LimitsConfig
) -> tuple[list[float], list[float], int]:
    """The permitted action, the target after it, and how many limits changed it."""
    count = 0
    found = list(action)
    move = [max(-1.0, min(1.0, each)) for each in action[:3]]
    if config.workspace:
        goal = [at + UNIT_M * each for at, each in zip(tool, move, strict=True)]
        inside = [
            max(low, min(high, each))
            for low, high, each in zip(
                config.workspace[:3], config.workspace[3:], goal, strict=True
            )
        ]
        back = [
            max(-1.0, min(1.0, (each - at) / UNIT_M)) for each, at in zip(inside, tool, strict=True)
        ]
        if math.dist(back, move) > 1e-5:
            count += 1
            move = found[:3] = back
    if config.translation is not None and math.hypot(*move) > config.translation + 1e-5:
        count += 1
        move = found[:3] = [each * config.translation / math.hypot(*move) for each in move]
    turn = [max(-1.0, min(1.0, each)) for each in action[3:6]]
    if config.rotation is not None and math.hypot(*turn) > config.rotation + 1e-5:
        count += 1
        found[3:6] = [each * config.rotation / math.hypot(*turn) for each in turn]
    return found, [at + UNIT_M * each for at, each in zip(tool, move, strict=True)], count


limits = st.builds(
    LimitsConfig,
    translation=st.none() | st.sampled_from([0.3, 0.9, 1.5]),
    rotation=st.none() | st.sampled_from([0.2, 1.0]),
    workspace=st.sampled_from([[], BOX]),
)


@given(limits, st.integers(0, 2**31), st.integers(1, 5))
@settings(max_examples=80)
def test_each_action_is_changed_as_by_a_plain_loop(
    config: LimitsConfig, seed: int, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    actions = 1.2 * torch.randn(3, chunk, 7, generator=generator)
    tools = torch.tensor(
        [[0.0, 0.0, 0.1], [0.19, 0.14, 0.29], [0.4, 0.0, -0.1]]
    )  # within, in a corner, outside
    found, count = limited(actions, tools, config, UNIT_M)
    for row in range(3):
        tool = tools[row].tolist()
        for place in range(chunk):
            wanted, tool, changes = plain(actions[row, place].tolist(), tool, config)
            torch.testing.assert_close(found[row, place], torch.tensor(wanted), atol=2e-5, rtol=0)
            assert count[row, place] == changes
            if not changes:
                assert torch.equal(found[row, place], actions[row, place]), (
                    "an action within all limits keeps its bits"
                )
    again, twice = limited(
        found[:2], tools[:2], config, UNIT_M
    )  # from far outside, a permitted action does not reach the box
    torch.testing.assert_close(again, found[:2], atol=1e-5, rtol=0)
    assert not twice.any(), "a permitted action is permitted"


class Arm(VectorEnv):
    """Moves where its actions say; an episode ends after ``seed`` steps."""

    def __init__(
        self, num_envs: int = 2, tool: ToolUnits | None = TOOL, dims: tuple[int, int] = (4, 8)
    ) -> None:
        self.spec = EnvSpec(
            num_envs, dims[0], dims[1], 10.0, 50, {}, ("arm",), torch.device("cpu"), tool
        )
        self.at = torch.zeros(num_envs, dims[1])
        self.left = torch.zeros(num_envs, dtype=torch.int64)
        self.done: list[Tensor] = []

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        fresh = torch.ones(len(episodes), dtype=torch.bool) if mask is None else mask
        self.at = torch.where(fresh[:, None], 0, self.at)
        self.left = torch.where(fresh, episodes.seed, self.left)

    def reset_wait(self) -> Observation:
        return Observation({}, self.at.clone(), ["go"] * len(self.at))

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self._actions = actions

    def step_wait(self) -> StepResult:
        valid, ended = torch.zeros(2, *self._actions.shape[:2], dtype=torch.bool)
        for place in range(self._actions.shape[1]):
            valid[:, place] = self.left > 0
            self.at[:, :3] += UNIT_M * self._actions[:, place, :3] * valid[:, place, None]
            self.left = (self.left - 1).clamp(min=0)
            ended[:, place] = valid[:, place] & (self.left == 0)
            self.done.append(torch.where(valid[:, place, None], self._actions[:, place], torch.nan))
        none = torch.zeros_like(valid)
        return StepResult(self.reset_wait(), valid.float(), ended, none, none, valid)


def episodes(*seeds: int) -> Episodes:
    return Episodes.first_attempts(torch.zeros(len(seeds), dtype=torch.int64), torch.tensor(seeds))


def test_the_cost_counts_executed_actions_only_and_the_wall_is_known_from_chunk_to_chunk() -> None:
    arm = Arm()
    env = LimitedEnv(arm, LimitsConfig(translation=0.8, workspace=[-1, -1, -1, 0.25, 1, 1]))
    env.reset(episodes(9, 2))
    chunk = torch.tensor([[1.0, 0, 0, 1], [0.5, 0, 0, 1], [1.0, 0, 0, 1]]).repeat(2, 1, 1)
    first = env.step(chunk)
    second = None
    assert first.cost is not None and first.cost.dtype == torch.float32
    # 0.08, 0.13, 0.21 m; the second environment executes two actions
    assert first.cost.tolist() == [[1, 0, 1], [1, 0, 0]]
    env.reset(episodes(0, 9), torch.tensor([False, True]))
    second = env.step(chunk)
    assert second.cost is not None
    assert second.cost.tolist() == [[1, 1, 1], [1, 0, 1]], (
        "0.25 m is the wall: 4 cm are left, which is no more than 0.8 of a step"
    )
    torch.testing.assert_close(arm.at[:, 0], torch.tensor([0.25, 0.21]))


def test_late_chunks_have_their_costs_at_the_places_of_their_actions() -> None:
    env = DeadlineEnv(LimitedEnv(Arm(1), LimitsConfig(translation=0.8)), Deadline((1,), 2), 0)
    env.reset(episodes(9))
    fast = torch.tensor([[[0.1, 0, 0, 1], [1.0, 0, 0, 1], [1.0, 0, 0, 1]]])
    for wanted in (
        [0, 1, 0],
        [0, 1, 1],
    ):  # the first chunk is awaited at rest, the second comes one step late
        result = env.step(fast)
        assert result.cost is not None and result.cost.tolist() == [wanted]
        assert not (result.cost.bool() & ~result.valid).any()


def test_what_cannot_be_limited() -> None:
    for arm, config, told in (
        (
            Arm(tool=None),
            LimitsConfig(translation=1.0),
            "rollout.limits: actions of this environment do not move a tool",
        ),
        (
            Arm(),
            LimitsConfig(rotation=1.0),
            "rollout.limits.rotation: this environment's 4 action numbers do not rotate",
        ),
        (
            Arm(dims=(4, 2)),
            LimitsConfig(workspace=BOX),
            "rollout.limits.workspace: this environment's states do not begin with",
        ),
    ):
        with pytest.raises(UserError) as error:
            LimitedEnv(arm, config)
        assert str(error.value).startswith(told) and "\n" not in str(error.value)
    assert LimitedEnv(Arm(), LimitsConfig(translation=1.0)).spec == replace(Arm().spec)
