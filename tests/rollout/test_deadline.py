"""Late action chunks in simulation, against single steps of a plain loop and against the robot's control loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import DeadlineConfig
from rlinf_vla.config.robot import ControlConfig
from rlinf_vla.core.protocols import EnvSpec, ToolUnits, VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult
from rlinf_vla.features.realworld.inference import Chunk, Request
from rlinf_vla.rollout.deadline import OPEN, Deadline, DeadlineEnv, deadline_of
from rlinf_vla.rollout.reward_shaping import RewardedEnv, RewardShaper
from rlinf_vla.testing.toy_env import CounterWorld
from tests.features.realworld.control import Cell
from tests.rollout.walk import Walk

SEEDS = (3, 11, 40)


class Log(VectorEnv):
    """Records each executed action; the state is the control step. An episode ends after ``seed % 7 + 5`` steps."""

    def __init__(self, num_envs: int = len(SEEDS), limit: int = 50) -> None:
        self.spec = EnvSpec(
            num_envs,
            2,
            1,
            10.0,
            limit,
            {"c": (1, 1)},
            ("log",),
            torch.device("cpu"),
            ToolUnits(1.0),
        )
        self.done: list[list[list[float]]] = [[] for _ in range(num_envs)]
        self.limits = [0] * num_envs

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        for row, seed in enumerate(episodes.seed.tolist()):
            if mask is None or mask[row]:
                self.done[row] = []
                self.limits[row] = seed % 7 + 5

    def reset_wait(self) -> Observation:
        count = torch.tensor([[float(len(each))] for each in self.done])
        return Observation(
            {"c": count.byte()[:, None, None].expand(-1, 1, 1, 3).clone()},
            count,
            ["log"] * len(count),
        )

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self._actions = actions
        self._skip = skip_ended

    def step_wait(self) -> StepResult:
        shape = self._actions.shape[:2]
        reward = torch.zeros(shape)
        flags = torch.zeros(4, *shape, dtype=torch.bool)
        for row, chunk in enumerate(self._actions.tolist()):
            assert self._skip or len(self.done[row]) < self.limits[row]
            for place, action in enumerate(chunk):
                if len(self.done[row]) < self.limits[row]:
                    self.done[row].append(action)
                    reward[row, place] = float(len(self.done[row]))
                    flags[3, row, place] = True
                    flags[0, row, place] = len(self.done[row]) == self.limits[row]
        return StepResult(self.reset_wait(), reward, flags[0], flags[1], flags[2], flags[3])


def chunks(seen: Observation, chunk: int) -> Tensor:
    """Each action tells the control step of its observation and its place in the chunk."""
    place = torch.arange(chunk).expand(len(seen.state), -1)
    return torch.stack([seen.state.expand(-1, chunk), place.float()], -1) / 1000


def played(env: DeadlineEnv, chunk: int, calls: int) -> list[tuple[Observation, StepResult]]:
    seeds = torch.tensor(SEEDS)
    seen = env.reset(Episodes.first_attempts(torch.zeros_like(seeds), seeds))
    found = []
    for number in range(calls):
        env.step_async(chunks(seen, chunk), skip_ended=number > 0)
        result = env.step_wait()
        found.append((seen, result))
        seen = result.observation
    return found


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 5))
@settings(max_examples=60)
def test_chunks_arrive_late(ticks: list[int], more: int, seed: int) -> None:
    """Each inference sees the arm one delay before its chunk arrives, and its chunk is executed from that delay on."""
    horizon = max(max(ticks), 1) + more
    chunk = horizon + max(ticks)
    log = Log()
    found = played(DeadlineEnv(log, Deadline(tuple(ticks), horizon), seed), chunk, 4)
    for row, executed in enumerate(log.done):
        expected = []
        observed = 0
        for call, (seen, result) in enumerate(found):
            arrived = min(call * horizon, log.limits[row])
            if arrived == log.limits[row]:
                assert not result.valid[row].any()
                continue
            assert seen.state[row].item() == seen.images["c"][row, 0, 0, 0].item() == observed
            delay = arrived - observed
            assert delay == 0 if call == 0 else delay in ticks
            count = min(horizon, log.limits[row] - arrived)
            expected += [[observed / 1000, (delay + place) / 1000] for place in range(count)]
            valid = torch.zeros(chunk, dtype=torch.bool)
            valid[delay : delay + count] = True
            assert torch.equal(result.valid[row], valid)
            assert result.reward[row][valid].tolist() == [
                arrived + place + 1 for place in range(count)
            ]
            over = arrived + count == log.limits[row]
            assert (
                bool(result.terminated[row].any()) == over
                and not (result.terminated[row] & ~valid).any()
            )
            observed = int(result.observation.state[row].item())
            assert observed == log.limits[row] if over else arrived + count - observed in ticks
        np.testing.assert_allclose(executed, expected, rtol=1e-6)


def test_delays_depend_on_seed_episode_and_step_alone() -> None:
    ticks = Deadline((0, 1, 2, 3), 3)
    whole = Log()
    log = Log(1)
    played(DeadlineEnv(whole, ticks, 5), 6, 3)
    single = DeadlineEnv(log, ticks, 5)
    for row, seed in enumerate(SEEDS):
        seen = single.reset(
            Episodes.first_attempts(torch.zeros(1, dtype=torch.int64), torch.tensor([seed]))
        )
        for number in range(3):
            single.step_async(chunks(seen, 6), skip_ended=number > 0)
            seen = single.step_wait().observation
        assert log.done[0] == whole.done[row]
    other = Log()
    played(DeadlineEnv(other, ticks, 6), 6, 3)
    assert other.done != whole.done


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_constant_delay_gives_the_actions_of_the_control_loop(delay: int) -> None:
    """From the second chunk on: the loop executes the first one for a delay longer, as it asks at equal intervals."""
    horizon, chunk = 3, 6
    log = Log()
    played(DeadlineEnv(log, Deadline((delay,), horizon), 0), chunk, 3)
    cell = Cell(
        [100 * delay - 50],
        chunk,
        ControlConfig(warmup=0, asynchronous=True, execution_horizon=horizon),
    )

    def infer(request: Request) -> Chunk:
        actions = np.zeros((chunk, 4), np.float32)
        actions[:, 0] = request.step / 1000
        actions[:, 3] = np.arange(chunk) / 1000
        return Chunk(request, actions)

    cell.infer = infer  # type: ignore[method-assign]
    cell.run(20)
    of_loop = [
        (round(1000 * float(step.action[0])), round(1000 * float(step.action[3])))
        for step in cell.steps
        if step.action is not None
    ]
    of_env = [(round(1000 * observed), round(1000 * place)) for observed, place in log.done[1]]
    for executed, first in ((of_loop, horizon + delay), (of_env, horizon)):
        assert executed[:first] == [(0, place) for place in range(first)]
        observed = executed[first][0]
        assert executed[first : first + 2 * horizon] == [
            (observed + call * horizon, delay + place)
            for call in range(2)
            for place in range(horizon)
        ]


def test_nothing_counts_after_a_reward_has_ended_an_episode() -> None:
    """The simulator below the reward plays on, as it does not know."""

    def won_once_moved(seen: Observation, actions: Tensor, result: StepResult) -> StepResult:
        last = result.valid & (result.valid.cumsum(1) == result.valid.sum(1, keepdim=True))
        won = last & (result.observation.state[:, :1] >= 1)
        return replace(result, reward=won.float(), terminated=result.terminated | won)

    world = RewardedEnv(
        CounterWorld(2, 50, ends_at_goal=False, tool_m=0.01), RewardShaper(won_once_moved)
    )
    env = DeadlineEnv(world, Deadline((2,), 4), 0)
    seed = torch.tensor([3, 3])
    env.reset(Episodes.first_attempts(torch.zeros_like(seed), seed))
    actions = torch.zeros(2, 6, 4)
    actions[0, :, 0] = 1
    result = env.step(actions)  # the first part are two steps
    assert result.valid.int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert result.reward.tolist() == [[0, 1, 0, 0, 0, 0], [0] * 6] and result.terminated.sum(
        1
    ).tolist() == [1, 0]


def test_the_arm_is_held_where_a_chunk_is_dropped() -> None:
    log = Log(limit=100)
    env = DeadlineEnv(log, Deadline((1,), 3, drop=0.5), 0)
    found = played(env, 4, 4)
    held = sum(action == [0, OPEN] for row in log.done for action in row)
    assert (0 < held < sum(map(len, log.done)) and held % 3 == 0) or any(
        len(row) % 3 for row in log.done
    )
    assert all(result.valid.sum() for _, result in found[:1])


def test_the_recipe_says_what_does_not_fit(tmp_path: Path) -> None:
    assert deadline_of(DeadlineConfig(), 8, 10.0) is None
    found = deadline_of(DeadlineConfig(delays=[1, 3]), 8, 10.0)
    assert found == Deadline((1, 3), 5, 0.0)
    for config in (
        DeadlineConfig(delays=[5]),
        DeadlineConfig(delays=[2], execution_horizon=7),
        DeadlineConfig(delays=[4], execution_horizon=3),
    ):
        with pytest.raises(UserError, match="chunks of 8 actions run out"):
            deadline_of(config, 8, 10.0)
    path = tmp_path / "control.json"
    path.write_text(json.dumps({"control_hz": 10.0, "delay_ticks": {"1": 75, "2": 25}}))
    measured = deadline_of(DeadlineConfig(measured=str(path)), 12, 20.0)
    assert measured is not None and measured.horizon == 8
    assert [measured.ticks.count(ticks) for ticks in (2, 4)] == [75, 25], (
        "twice the rate, so twice the steps"
    )
    for text in (
        "",
        "[]",
        "{}",
        '{"control_hz": 10, "delay_ticks": {}}',
        '{"control_hz": 0, "delay_ticks": {"1": 1}}',
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=r"rollout\.deadline\.measured="):
            deadline_of(DeadlineConfig(measured=str(path)), 12, 20.0)


def test_an_arm_that_cannot_be_held_is_refused() -> None:
    with pytest.raises(UserError, match="do not move a tool"):
        DeadlineEnv(Walk([1.0], 4), Deadline((1,), 2), 0)
