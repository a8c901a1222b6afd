"""Processes whose slots step together: conformance suite, and death of a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.env import EPISODE_LIMIT, NUM_ENVS, VectorEnvConformance, assert_same, episodes, random_actions

PROGRAM = [str(Path(__file__).with_name("point_batch.py"))]


def make_env(slots: int = NUM_ENVS, processes: int = 1, spare: int = 0) -> ProcessVectorEnv:
    """spare: environments of each process's batch beyond its slots."""
    pool = SimulatorPool(PROGRAM, {"spare": spare}, slots=slots, processes=processes, episode_limit=EPISODE_LIMIT)
    return ProcessVectorEnv(pool, ("walk",))


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [make_env(), make_env(processes=2, spare=1)]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_episodes_of_different_age_are_replayed(ahead: int) -> None:
    """The slots of a lost process started at different times, some only now: each is replayed to its state."""
    env = make_env()
    actions = random_actions(env, 7, seed=0)
    only_first = torch.tensor([True, False, False])

    def play(kill: bool) -> object:
        env.reset(episodes(1, 2, 3))
        if ahead:
            env.step(actions[:, :ahead])
        env.reset(episodes(4, 0, 0), only_first)
        if kill:
            os.kill(env.pool.pids[0], signal.SIGKILL)
        return env.step(actions)

    expected = play(kill=False)
    assert_same(play(kill=True), expected)
    assert env.pool.restarts == 1
    env.close()


def test_a_process_reports_its_progress() -> None:
    """One more than the control steps of each slot's episode, also after a replay."""
    env = make_env()
    env.reset(episodes(1, 2, 3))
    env.step(random_actions(env, 2, seed=0))
    env.reset(episodes(4, 0, 0), torch.tensor([True, False, False]))
    assert env.pool.arrays.reached.tolist() == [1, 3, 3]
    os.kill(env.pool.pids[0], signal.SIGKILL)
    env.step(random_actions(env, 1, seed=0))
    assert env.pool.arrays.reached.tolist() == [2, 4, 4]
    env.close()


def test_slots_that_end_at_different_times_are_observed_at_their_ends() -> None:
    """One is truncated two steps into the chunk, the others continue."""
    env = make_env()
    env.reset(episodes(1, 2, 3))
    still = torch.zeros(NUM_ENVS, EPISODE_LIMIT - 2, 2)
    env.step(still)
    start = env.reset(episodes(0, 5, 6), torch.tensor([False, True, True]))
    result = env.step(torch.full((NUM_ENVS, 4, 2), 0.1))
    assert result.valid.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
    moved = (result.observation.state - start.state)[:, 0]
    assert torch.allclose(moved, torch.tensor([0.06, 0.12, 0.12]), atol=1e-6)
    env.close()
