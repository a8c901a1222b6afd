from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.parity import parity_errors
from rlinf_vla.core.protocols import Convention, Policy
from rlinf_vla.core.types import Inputs, Observation, StepResult, Trajectory
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.collector import (
    CallCounts,
    call_metrics,
    collect,
    rollout_calls,
    rollout_metrics,
)
from rlinf_vla.rollout.episodes import training_episodes
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.rollout.player import Call
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.policy_calls import with_critic
from rlinf_vla.testing.simulated_gpu import GPU, GpuTensor, simulated_gpu
from rlinf_vla.testing.toy_env import GOALS, CounterWorld, groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.models.tiny_openvla import tiny

SETTINGS = Settings(run_seed=11, temperature=1.0, batch_size=2)
CALLS, VERSION = 7, 5


def linear(chunk: int) -> Policy:
    return with_critic(LinearPolicy(LinearOptions(chunk=chunk)))


POLICIES: dict[str, Callable[[], Policy]] = {
    "one action per call": lambda: linear(1),
    "chunks of 4": lambda: linear(4),
    "openvla": lambda: with_critic(tiny()),
}
every_policy = pytest.mark.parametrize(
    "policy", [pytest.param(make(), id=name) for name, make in POLICIES.items()]
)


def rollout(
    policy: Policy, envs: list[CounterWorld], iteration: int = 2, settings: Settings = SETTINGS
) -> Trajectory:
    return collect(Actor(policy, settings), envs, iteration, VERSION, CALLS, Timeline())


def named_tensors(rollouts: Trajectory) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for field in fields(rollouts):
        value = getattr(rollouts, field.name)
        named = (
            {f"{field.name}.{key}": each for key, each in value.items()}
            if isinstance(value, dict)
            else {field.name: value}
        )
        found |= {name: each for name, each in named.items() if each is not None}
    return found


def assert_same(found: Trajectory, expected: Trajectory, tolerance: float = 0.0) -> None:
    first, second = named_tensors(found), named_tensors(expected)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.shape == second[name].shape and value.dtype == second[name].dtype, name
        difference = (value.double() - second[name].double()).abs().max()
        assert difference <= tolerance, f"{name} differs by {difference}"


@torch.no_grad()
def reference(policy: Policy, slot: int, iteration: int) -> Trajectory:
    """The expected rollout of one environment, call by call and alone."""
    env = CounterWorld(1)
    ordinal = 0
    step = 0
    rows = []
    for t in range(CALLS):
        if step == 0:
            episode = training_episodes(
                SETTINGS.run_seed,
                iteration,
                torch.tensor([slot]),
                torch.tensor([ordinal]),
                len(GOALS),
            )
            observation = env.reset(episode)
        inputs = policy.prepare(observation)
        now = torch.tensor([step])
        noise = CounterNoise(SETTINGS.run_seed, episode.task_id, episode.seed, now)
        sample = policy.act(policy.encode(inputs), noise, SETTINGS.temperature)
        result = env.step(sample.actions)
        observation = result.observation
        cut = torch.tensor([not result.terminated.any() and bool(result.done or t + 1 == CALLS)])
        bootstrap = (
            policy.value(policy.encode(policy.prepare(observation))) if cut else torch.zeros(1)
        )
        rows.append(
            Trajectory(
                inputs=inputs,
                latent=sample.latent,
                log_prob=sample.log_prob,
                value=sample.value,
                bootstrap_value=bootstrap,
                cut=cut,
                reward=result.reward,
                terminated=result.terminated,
                truncated=result.truncated,
                success=result.success,
                valid=result.valid,
                task_id=episode.task_id,
                seed=episode.seed,
                attempt=episode.attempt,
                step=now,
                policy_version=torch.tensor([VERSION]),
            )
        )
        step = 0 if result.done else step + int(result.valid.sum())
        ordinal += bool(result.done)
    return Trajectory.stack(rows)


@every_policy
def test_a_rollout_equals_that_of_each_environment_alone(policy: Policy) -> None:
    found = rollout(policy, groups(4, 2))
    expected = Trajectory.cat([reference(policy, slot, iteration=2) for slot in range(4)], dim=1)
    assert found.shape == (CALLS, 4) and found.valid.shape == (CALLS, 4, policy.spec.chunk)
    assert_same(found, expected, tolerance=2e-5)


@every_policy
def test_the_relevant_cases_occur(policy: Policy) -> None:
    """Otherwise the other tests would check nothing."""
    found = rollout(policy, groups(8, 1))
    ended = (found.terminated | found.truncated).any(-1)
    assert (
        found.terminated.any()
        and found.success.any()
        and (found.truncated.any(-1) & found.cut).any()
    )
    assert ended[:-1].sum() > 3 and not ended[-1].all()
    assert (found.bootstrap_value[found.cut] != 0).all() and (
        found.bootstrap_value[~found.cut] == 0
    ).all()
    assert (found.cut[-1] == ~found.terminated[-1].any(-1)).all(), (
        "the end of the rollout truncates every unfinished episode"
    )
    if policy.spec.chunk > 1:
        assert not found.valid.all(), "some episode ends inside a chunk"


@every_policy
def test_the_critic_values_what_is_seen_after_a_termination_only_if_told(policy: Policy) -> None:
    plain, valued = (
        rollout(policy, groups(8, 2), settings=replace(SETTINGS, values_ends=always))
        for always in (False, True)
    )
    terminated = (plain.terminated & plain.valid).any(-1)
    assert torch.equal(valued.cut, plain.cut | terminated) and terminated.any()
    assert torch.equal(valued.bootstrap_value[plain.cut], plain.bootstrap_value[plain.cut])
    assert (valued.bootstrap_value[terminated] != 0).all() and (
        plain.bootstrap_value[terminated] == 0
    ).all()
    assert_same(replace(valued, cut=plain.cut, bootstrap_value=plain.bootstrap_value), plain)


@every_policy
def test_pipeline_depth_does_not_change_the_result(policy: Policy) -> None:
    """With policy calls of one shape: bit for bit."""
    whole = rollout(policy, groups(8, 1))
    for depth in (2, 4):
        assert_same(rollout(policy, groups(8, depth)), whole)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_the_shape_of_policy_calls_does_not_change_the_result(batch_size: int) -> None:
    policy = linear(2)
    settings = replace(SETTINGS, batch_size=batch_size)
    assert_same(
        rollout(policy, groups(8, 2), settings=settings),
        rollout(policy, groups(8, 2)),
        tolerance=1e-5,
    )


def test_earlier_episodes_do_not_change_the_result() -> None:
    policy = linear(2)
    envs = groups(4, 2)
    first = rollout(policy, envs, iteration=3)
    other = rollout(policy, envs, iteration=4)
    assert_same(rollout(policy, envs, iteration=3), first)
    assert not (other.seed[0] == first.seed[0]).any()
    assert not torch.equal(
        rollout(policy, envs, iteration=3, settings=replace(SETTINGS, run_seed=12)).seed, first.seed
    )


def test_groups_overlap() -> None:
    """While one group simulates, the policy infers for the next: no group's step is awaited before the others have started."""
    journal: list[str] = []
    rollout(linear(2), groups(6, 3, journal=journal))
    last_start = {name: journal.index(f"{name} step") for name in "012"}
    assert max(last_start.values()) < journal.index("0 step done")
    under_way = set()
    most = 0
    for line in journal:
        name = line.split()[0]
        under_way = under_way - {name} if line.endswith("done") else under_way | {name}
        most = max(most, len(under_way))
    assert most == 3


@every_policy
def test_stored_log_probabilities_are_reproduced(policy: Policy) -> None:
    for temperature in (0.7, 1.0):
        settings = replace(SETTINGS, temperature=temperature)
        found = rollout(policy, groups(4, 2), settings=settings)
        assert parity_errors(policy, found.flatten(), temperature, calls=CALLS * 4).max() <= 1e-5
        assert (
            parity_errors(policy, found.flatten(), temperature * 1.5, calls=CALLS * 4).max() > 1e-3
        )


def test_parity_counts_only_executed_actions() -> None:
    policy = linear(4)
    found = rollout(policy, groups(8, 1))
    skipped = ~found.valid[..., None].expand_as(found.log_prob)
    assert skipped.any()
    unread = replace(found, log_prob=torch.where(skipped, -99.0, found.log_prob)).flatten()
    assert parity_errors(policy, unread, 1.0, calls=CALLS * 8).max() <= 1e-5
    wrong = found.log_prob.clone()
    wrong[0, 0, 0, 0] += 0.5
    assert parity_errors(
        policy, replace(found, log_prob=wrong).flatten(), 1.0
    ).max() == pytest.approx(0.5, abs=1e-4)


def test_progress_reaches_one() -> None:
    seen: list[float] = []
    collect(Actor(linear(2), SETTINGS), groups(4, 2), 0, 0, CALLS, Timeline(), seen.append)
    assert seen == sorted(seen) and len(seen) == 2 * CALLS and seen[-1] == 1


def test_a_simulator_that_fails_ends_the_rollout() -> None:
    class Failing(CounterWorld):
        def step_wait(self) -> StepResult:
            raise OSError("out of fingers")

    with pytest.raises(OSError, match="fingers"):
        rollout(linear(1), [CounterWorld(2), Failing(2)])


@pytest.mark.parametrize("ends_at_goal", [True, False])
@pytest.mark.parametrize("chunk", [1, 4])
def test_metrics_against_a_loop(chunk: int, ends_at_goal: bool) -> None:
    found = rollout(linear(chunk), groups(8, 2, ends_at_goal=ends_at_goal))
    lengths, outcomes, rewards, returns = [], [], [], []
    for env in range(8):
        length = 0
        won = False
        returns.append(0.0)
        for t in range(CALLS):
            for c in range(chunk):
                if not found.valid[t, env, c]:
                    continue
                length = length + 1
                won = won or bool(found.success[t, env, c])
                rewards.append(float(found.reward[t, env, c]))
                returns[-1] += rewards[-1]
                if found.terminated[t, env, c] or found.truncated[t, env, c]:
                    lengths.append(length)
                    outcomes.append(won)
                    returns.append(0.0)
                    length = 0
                    won = False
    assert rollout_metrics(found) == pytest.approx(
        {
            "rollout/steps": len(rewards),
            "rollout/episodes": len(lengths),
            "rollout/reward_mean": sum(rewards) / len(rewards),
            "rollout/success_once": sum(outcomes) / len(outcomes),
            "rollout/episode_len": sum(lengths) / len(lengths),
            "rollout/return_min": min(returns),
            "rollout/return_max": max(returns),
        },
        abs=1e-6,
    )


def counted(policy: Policy, envs: list[CounterWorld]) -> tuple[dict[str, float], list[Call]]:
    """The metrics of a rollout's calls, and the calls."""
    counts = [CallCounts(env.spec, policy) for env in envs]
    calls: list[Call] = []

    def beside(call: Call) -> dict[str, Tensor]:
        counts[len(calls) % len(envs)].add(call)
        calls.append(call)
        return {}

    collect(Actor(policy, SETTINGS), envs, 2, VERSION, CALLS, Timeline(), beside=beside)
    return call_metrics(each.totals() for each in counts), calls


@pytest.mark.parametrize(
    ("gripper", "sign"), [("open_positive", 1), ("close_positive", -1), ("zero_to_one", 0)]
)
def test_metrics_of_calls_against_a_loop(gripper: str, sign: int) -> None:
    envs = groups(4, 2, tool_m=0.1)
    for env in envs:
        convention = replace(env.spec.convention, gripper=gripper)
        env.spec = replace(env.spec, native=convention)
    metrics, calls = counted(linear(4), envs)
    executed = [
        action
        for call in calls
        for chunk, valid in zip(call.sample.actions.tolist(), call.result.valid, strict=True)
        for action, was in zip(chunk, valid.tolist(), strict=True)
        if was
    ]
    bounds = sum(abs(number) >= 0.99 for action in executed for number in action[:3])
    closed = sum(
        action[3] * sign < 0
        if sign
        else action[3] < 0.5  # +1 opens, -1 opens, 1 opens and 0 closes
        for action in executed
    )
    assert 0 < bounds < 3 * len(executed) and 0 < closed < len(executed)
    assert metrics == {
        "rollout/actions_at_bounds": bounds / (3 * len(executed)),
        "rollout/gripper_closed": closed / len(executed),
    }


def test_actions_without_a_convention_are_not_judged() -> None:
    (env,) = groups(2, 1)
    assert env.spec.convention == Convention() and counted(linear(1), [env])[0] == {}


def test_states_beyond_the_statistics_are_counted() -> None:
    class Scaled(LinearPolicy):
        """Sees its state in units of three steps."""

        def prepare(self, obs: Observation) -> Inputs:
            padding = torch.zeros(len(obs.state), 3)
            return super().prepare(obs) | {"scaled": torch.cat([obs.state / 3, padding], 1)}

    policy = Scaled(LinearOptions(chunk=1))
    policy.state_limit = ("scaled", 1.0)
    policy.spec = replace(policy.spec, state_dim=2)
    metrics, calls = counted(policy, groups(2, 1))
    numbers = [
        number for call in calls for row in call.observation.state.tolist() for number in row
    ]
    outside = sum(abs(number) >= 3 for number in numbers)
    assert outside and metrics == {"rollout/state_outliers": outside / len(numbers)}


def test_metrics_without_a_finished_episode() -> None:
    found = collect(
        Actor(linear(1), SETTINGS), [CounterWorld(2, episode_limit=50)], 0, 0, 1, Timeline()
    )
    assert not (found.terminated | found.truncated).any()
    metrics = rollout_metrics(found)
    assert metrics["rollout/episodes"] == 0 and "rollout/success_once" not in metrics


@pytest.mark.parametrize(("limit", "chunk"), [(6, 1), (6, 2), (6, 4), (5, 4), (3, 4)])
def test_a_rollout_can_consist_of_complete_episodes(limit: int, chunk: int) -> None:
    world = CounterWorld(2, episode_limit=limit, ends_at_goal=False)
    found = collect(
        Actor(linear(chunk), SETTINGS),
        [world],
        0,
        0,
        rollout_calls(3 * limit, limit, chunk),
        Timeline(),
    )
    assert int(found.truncated.sum()) == 2 * 3 and int(found.valid.sum()) == 2 * 3 * limit
    assert found.truncated[-1].any(-1).all(), "no partial episode remains"


def test_a_rollout_is_stored_on_the_cpu() -> None:
    """The memory of a GPU is for the networks."""
    with simulated_gpu():
        policy = LinearPolicy(LinearOptions(chunk=2)).to(GPU)
        rollouts = collect(Actor(policy, Settings(0, 1.0, 2)), groups(4, 2), 0, 0, 6, Timeline())
    tensors = [
        *rollouts.inputs.values(),
        *rollouts.latent.values(),
        rollouts.log_prob,
        rollouts.value,
        rollouts.reward,
        rollouts.step,
    ]
    assert not any(isinstance(each, GpuTensor) for each in tensors)
