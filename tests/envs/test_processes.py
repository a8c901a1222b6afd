"""Simulator processes: the conformance suite on a toy simulator, and everything that can happen to a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.child_process import Child
from rlinf_vla.core.images import through_jpeg
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import EXCEPTION_FAULT, LOST_FAULT, StepResult
from rlinf_vla.envs import shared_arrays
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.env import (
    EPISODE_LIMIT,
    NUM_ENVS,
    VectorEnvConformance,
    assert_same,
    episodes,
    random_actions,
)

PROGRAM = [str(Path(__file__).with_name("point_simulator.py"))]


def make_env(slots: int = NUM_ENVS, processes: int = 2, **options: Any) -> ProcessVectorEnv:
    pool = SimulatorPool(
        PROGRAM, options, slots=slots, processes=processes, episode_limit=EPISODE_LIMIT
    )
    return ProcessVectorEnv(pool, ("walk",))


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [make_env(processes=1), make_env(processes=2)]


@pytest.fixture
def env() -> Iterator[ProcessVectorEnv]:
    env = make_env()
    yield env
    env.close()


def play(
    env: ProcessVectorEnv, between: Any = lambda: None, during: Any = lambda: None
) -> list[StepResult]:
    """A rollout with a partial reset in it; ``between`` happens between calls and ``during`` while calls are under way."""
    results = []
    between()
    env.reset_async(episodes(1, 2, 3))
    during()
    env.reset_wait()
    for call in range(4):
        between()
        env.step_async(random_actions(env, 3, seed=call))
        during()
        results.append(env.step_wait())
        if call == 1:
            between()
            env.reset_async(episodes(4, 5, 6), torch.tensor([True, False, False]))
            during()
            env.reset_wait()
    return results


def assert_all_same(a: list[StepResult], b: list[StepResult]) -> None:
    for one, other in zip(a, b, strict=True):
        assert_same(one, other)


def test_round_trips_through_jpeg_are_made_in_the_simulators_processes(
    env: ProcessVectorEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They show the same bits as this process would make, also after a process was replaced."""
    env.add_jpeg(["map"])
    monkeypatch.setattr(shared_arrays, "round_trip", None)  # not here
    shown = [result.observation for result in play(env)]
    again = [
        result.observation
        for result in play(env, during=lambda: os.kill(env.pool.pids[0], signal.SIGKILL))
    ]
    assert env.pool.restarts > 0
    for one, other in zip(shown, again, strict=True):
        assert torch.equal(one.jpeg["map"], through_jpeg(one.images["map"])) and torch.equal(
            one.jpeg["map"], other.jpeg["map"]
        )
    env.add_jpeg([])
    assert env.reset(episodes(1, 2, 3)).jpeg == {}


@pytest.mark.parametrize("moment", ["between", "during"])
def test_a_killed_process_is_not_noticed(env: ProcessVectorEnv, moment: str) -> None:
    expected = play(env)

    def kill() -> None:
        os.kill(env.pool.pids[0], signal.SIGKILL)

    assert_all_same(play(env, **{moment: kill}), expected)
    assert env.pool.restarts >= 3  # a victim may have answered already


def test_all_processes_killed_at_once_are_not_noticed(env: ProcessVectorEnv) -> None:
    expected = play(env)

    def kill() -> None:
        for pid in env.pool.pids:
            os.kill(pid, signal.SIGKILL)

    assert_all_same(play(env, between=kill), expected)


def test_an_expert_and_a_picture_survive_a_kill(env: ProcessVectorEnv) -> None:
    play(env)
    advice = env.expert_actions()
    picture = env.render(0)
    os.kill(env.pool.pids[0], signal.SIGKILL)
    assert torch.equal(env.expert_actions(), advice)
    os.kill(env.pool.pids[0], signal.SIGKILL)
    assert torch.equal(env.render(0), picture)


def test_a_hanging_process_is_replaced(
    env: ProcessVectorEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = play(env)
    env.reset(episodes(1, 2, 3))
    os.kill(env.pool.pids[1], signal.SIGSTOP)
    asked = list[Child]()
    allow = Child.allow
    monkeypatch.setattr(
        Child, "allow", lambda child, seconds: (asked.append(child), allow(child, seconds))[1]
    )
    env.step_async(random_actions(env, 3, seed=0))
    asked[1].allow(2.0)  # the other one and the one that replaces it have as much time as ever
    assert_same(env.step_wait(), expected[0])
    assert env.pool.restarts == 1


def assert_cut(result: StepResult, faults: list[int]) -> None:
    """The episodes with a fault ended in the first step of this call, with the reward 0."""
    assert result.fault is not None and result.fault[:, 0].tolist() == faults
    cut = result.fault[:, 0] > 0
    assert torch.equal(result.truncated[:, 0], cut) and not result.reward[cut].any()
    assert result.valid[cut, 0].all() and not result.valid[cut, 1:].any()


@pytest.mark.slow
def test_an_episode_in_which_processes_hang_again_and_again_is_cut(
    env: ProcessVectorEnv, capfd: pytest.CaptureFixture[str]
) -> None:
    env.reset(episodes(1, 2, 3))
    env.pool.step_timeout = 1.0
    assert_cut(env.step(torch.full((NUM_ENVS, 1, 2), 60.0)), [LOST_FAULT] * 3)
    told = "3 times in a row without progress: the last one did not answer for 1 s while it carried out 'step'"
    assert told in capfd.readouterr().err


def test_a_process_killed_while_it_starts_is_replaced() -> None:
    pool = SimulatorPool(PROGRAM, {}, slots=2, processes=2, episode_limit=EPISODE_LIMIT)
    os.kill(pool.pids[1], signal.SIGKILL)
    env = ProcessVectorEnv(pool, ("walk",))
    env.reset(episodes(1, 2))
    env.close()
    assert pool.restarts == 1


def test_an_action_that_always_kills_costs_its_episode(
    env: ProcessVectorEnv, capfd: pytest.CaptureFixture[str]
) -> None:
    killing = torch.zeros(NUM_ENVS, 2, 2)
    killing[0, 1] = 101.0
    env.reset(episodes(1, 2, 3))
    assert_cut(env.step(killing), [LOST_FAULT, 0, 0])
    told = capfd.readouterr().err
    assert "exit code 7 while it carried out 'step'.\nout of ink" in told, told
    assert told.endswith("the episodes of 1 environments are cut: lost simulator processes\n")
    again = env.reset(episodes(1, 2, 3))
    assert torch.equal(again.state, env.reset(episodes(1, 2, 3)).state)


def play_with(lives: str, file: Path) -> tuple[list[StepResult], int]:
    """Two steps of five actions, and how many processes were lost meanwhile."""
    file.write_text(lives)
    env = make_env(slots=1, processes=1, lives=str(file))
    env.reset(episodes(1))
    actions = random_actions(env, 10, seed=0)
    try:
        return [env.step(actions[:, :5]), env.step(actions[:, 5:])], env.pool.restarts
    finally:
        env.close()


def test_processes_that_each_get_further_may_be_lost_any_number_of_times(tmp_path: Path) -> None:
    expected, _ = play_with("", tmp_path / "lives")
    results, restarts = play_with("6  0 1 2 2 3 3 5 7 7 8", tmp_path / "lives")
    assert restarts == 11
    assert_all_same(results, expected)


@pytest.mark.parametrize("lives", ["6  3 3 3  9 9", "6  0 4 2 4  9 9", "6  7 7 7  9 9"])
def test_an_episode_in_which_processes_get_no_further_is_cut(lives: str, tmp_path: Path) -> None:
    results, _ = play_with(lives, tmp_path / "lives")
    assert_cut(results[1], [LOST_FAULT])
    assert (tmp_path / "lives").read_text() == "9", "one more process, for the episodes after it"


@pytest.mark.parametrize("first", [True, False])
def test_an_exception_in_a_reset_ends_only_its_episode(
    first: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    env = make_env(no_start_from=5)
    if not first:
        env.reset(episodes(1, 3, 4))
    seen = env.reset(episodes(1, 5, 2))
    assert all(seen.instruction) and seen.state.isfinite().all()
    actions = random_actions(env, 3, seed=0)
    result = env.step(actions)
    assert_cut(result, [0, EXCEPTION_FAULT, 0])
    told = capfd.readouterr().err
    assert "FileNotFoundError: no drawing" in told and told.endswith(
        "are cut: an exception in the simulator\n"
    )
    only_second = torch.tensor([False, True, False])
    assert torch.equal(
        env.reset(episodes(0, 4, 0), only_second).state[::2], result.observation.state[::2]
    )
    whole = make_env()
    whole.reset(episodes(1, 4, 2))
    whole.step(actions)
    whole.reset(episodes(0, 4, 0), only_second)
    assert_same(env.step(actions), whole.step(actions))
    for each in (env, whole):
        each.reset(episodes(4, 5 if each is env else 4, 4))
        each.reset(episodes(1, 2, 3))
    assert_same(env.step(actions), whole.step(actions))
    env.close()
    whole.close()


def test_an_exception_of_the_expert_ends_only_its_episode(
    capfd: pytest.CaptureFixture[str],
) -> None:
    env = make_env(no_advice_from=5)
    env.reset(episodes(1, 5, 2))
    assert env.expert_actions().isfinite().all()
    env.render(1)
    assert_cut(env.step(env.expert_actions()[:, None]), [0, EXCEPTION_FAULT, 0])
    env.expert_actions()
    env.step_async(random_actions(env, 1, seed=0), skip_ended=True)
    again = env.step_wait()
    assert (
        again.valid[:, 0].tolist() == [True, False, True]
        and again.fault is not None
        and not again.fault.any()
    )
    assert capfd.readouterr().err.count("are cut") == 1
    env.close()


def test_an_exception_in_a_step_ends_only_its_episode(
    env: ProcessVectorEnv, capfd: pytest.CaptureFixture[str]
) -> None:
    actions = random_actions(env, 3, seed=0)
    env.reset(episodes(1, 2, 3))
    expected = [env.step(actions), env.step(actions)]
    shown = env.reset(episodes(1, 2, 3)).state.clone()
    failing = actions.clone()
    failing[0, 1] = -101.0
    first = env.step(failing)
    assert_cut(first, [EXCEPTION_FAULT, 0, 0])
    assert torch.equal(first.observation.state[0], shown[0]), "what was seen before"
    for found, whole in zip(
        (first, env.step_async(actions, True) or env.step_wait()), expected, strict=True
    ):
        for name, value in found.outcome.items():
            assert torch.equal(value[1:], whole.outcome[name][1:]), name
        assert torch.equal(found.observation.state[1:], whole.observation.state[1:])
    env.reset(episodes(1, 2, 3))
    assert_same(env.step(actions), expected[0])
    assert env.pool.restarts == 0
    told = capfd.readouterr().err
    assert "point_simulator.py" in told and told.endswith(
        "ZeroDivisionError: paper torn\nthe episodes of 1 environments are cut: an exception in the simulator\n"
    )


def test_a_process_that_cannot_start_is_reported() -> None:
    with pytest.raises(
        RuntimeError, match=r"(?s)3 times in a row.*exit code 7 while it started.*no ink left"
    ):
        make_env(dies_at_start=True)


def test_a_machine_that_cannot_run_the_simulator_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match=r"^this machine lacks a pencil: sharpen one$"):
        make_env(unusable=True)


def test_ctrl_c_does_not_reach_the_processes(env: ProcessVectorEnv) -> None:
    pid = env.pool.pids[0]
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)
    play(env)
    assert env.pool.restarts == 0


def test_processes_end_with_their_parent() -> None:
    code = f"""
import sys, time
from rlinf_vla.envs.processes import SimulatorPool
pool = SimulatorPool({PROGRAM!r}, {{}}, slots=2, processes=2, episode_limit=5)
pool.spec
print(*pool.pids, flush=True)
time.sleep(100)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + 120  # bounds a hang alone
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "the processes outlived their parent"
        time.sleep(0.05)


def test_closing_ends_the_processes_and_leaks_nothing() -> None:
    files = len(list(Path("/proc/self/fd").iterdir()))
    threads = threading.active_count()
    env = make_env()
    pids = env.pool.pids
    env.reset(episodes(1, 2, 3))
    env.close()
    assert not any(_alive(pid) for pid in pids)
    del env
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert threading.active_count() == threads


def test_one_command_at_a_time(env: ProcessVectorEnv) -> None:
    env.reset(episodes(1, 2, 3))
    env.step_async(random_actions(env, 1, seed=0))
    with pytest.raises(RuntimeError, match="under way"):
        env.reset_async(episodes(1, 2, 3))
    env.step_wait()


def test_stepping_before_the_first_reset_is_refused(env: ProcessVectorEnv) -> None:
    with pytest.raises(RuntimeError, match="environment 0 has no episode"):
        env.step(random_actions(env, 1, seed=0))
    with pytest.raises(UserError, match="no expert here"):
        ProcessVectorEnv(env.pool, ("walk",), no_expert="no expert here").expert_actions()


def _alive(pid: int) -> bool:
    """Whether the process runs: one that has ended and was not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
