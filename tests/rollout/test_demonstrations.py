from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.sft import Demonstrations
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Inputs, Observation, StepResult
from rlinf_vla.rollout.demonstrations import collect_demonstrations
from rlinf_vla.rollout.episodes import DEMONSTRATION_SEEDS
from rlinf_vla.rollout.faults import GuardedEnv
from rlinf_vla.rollout.reward_shaping import RewardedEnv, RewardShaper
from rlinf_vla.testing.toy_env import GOALS, CounterWorld, groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

NOISY = DemonstrationConfig(episodes=11, noise=[0.0, 0.8], random_actions=0.3)
CLEAN = DemonstrationConfig(episodes=11, noise=[0.0], random_actions=0.5)


class WholeImages(LinearPolicy):
    """Keeps the complete image, from which the state can be read."""

    def prepare(self, obs: Observation) -> Inputs:
        return {"image": obs.images["base"].clone()}


@dataclass(frozen=True)
class State:
    seed: int
    level: int
    clock: int

    @classmethod
    def read(cls, image: Tensor) -> State:
        # the row and the column at the edge show only one quantity
        return cls(
            int(image[0, 0, 2]),
            (int((image[-1, :, 0] == 255).sum()) - 32) // 8,
            int((image[:, -1, 1] == 255).sum()) // 3,
        )

    @property
    def label(self) -> list[float]:
        return [1.0, self.level / 4, self.clock / 32, 0.0]


def shown(
    config: DemonstrationConfig = NOISY,
    chunk: int = 1,
    envs: Sequence[VectorEnv] | None = None,
    run_seed: int = 0,
) -> tuple[Demonstrations, float]:
    return collect_demonstrations(
        WholeImages(LinearOptions(chunk=chunk)), envs or groups(4, 2), config, run_seed
    )


def by_episode(demonstrations: Demonstrations) -> list[list[State]]:
    """States in order, split where the clock restarts."""
    episodes: list[list[State]] = []
    for image in demonstrations.inputs["image"]:
        state = State.read(image)
        if state.clock == 0:
            episodes.append([])
        episodes[-1].append(state)
    return episodes


def test_every_state_has_the_experts_own_action() -> None:
    found, success = shown()
    assert found.actions.shape == (len(found), 1, 4) and found.actions.dtype == torch.float32
    for image, action in zip(found.inputs["image"], found.actions, strict=True):
        assert action[0].tolist() == pytest.approx(State.read(image).label)
    assert 0 < success < 1, "under noise the expert sometimes fails"
    assert found.counts.all() and len(found.counts) == len(found)


def test_each_episode_once_and_in_order() -> None:
    episodes = by_episode(shown()[0])
    seeds = [DEMONSTRATION_SEEDS[number // len(GOALS)] for number in range(NOISY.episodes)]
    assert [episode[0].seed for episode in episodes] == [seed % 251 for seed in seeds]
    for episode in episodes:
        assert [state.clock for state in episode] == list(range(len(episode))) and len(episode) <= 6
        assert len({state.seed for state in episode}) == 1


def test_noise_leaves_the_experts_path() -> None:
    rising = by_episode(shown(CLEAN)[0])
    noisy = by_episode(shown()[0])
    assert shown(CLEAN)[1] == 1.0, "without noise nothing is random, for any random_actions"
    for episode in rising:
        assert [state.level for state in episode] == list(
            range(episode[0].level, episode[0].level + len(episode))
        )
    strayed = [any(b.level != a.level + 1 for a, b in pairwise(e)) for e in noisy]
    assert any(strayed) and not all(strayed), "each episode draws its own level of noise"


class Watched(CounterWorld):
    """Keeps the executed actions and those of the expert."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.executed: list[Tensor] = []
        self.advice: list[Tensor] = []

    def step_async(self, actions: Tensor, skip_ended: bool = False) -> None:
        self.advice.append(self.expert_actions())
        self.executed.append(actions[:, 0])
        super().step_async(actions, skip_ended)


@pytest.mark.parametrize(("sigma", "random_actions"), [(0.3, 0.0), (0.3, 1.0)])
def test_the_executed_actions_have_the_configured_noise(
    sigma: float, random_actions: float
) -> None:
    env = Watched(8)
    shown(
        DemonstrationConfig(episodes=160, noise=[sigma], random_actions=random_actions), envs=[env]
    )
    executed, advice = torch.cat(env.executed), torch.cat(env.advice)
    assert executed.abs().max() <= 1 and len(executed) > 400
    if random_actions:
        assert (
            abs(float(executed.mean())) < 0.06 and abs(float((executed**2).mean()) - 1 / 3) < 0.03
        ), "uniform"
    else:
        noise = (executed - advice)[:, 3]
        assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - sigma) < 0.03
    assert len(executed[:, 3].unique()) > 0.9 * len(executed), "drawn at every step"


def test_a_detour_starts_the_episode_in_one_direction_and_is_not_learnt() -> None:
    env = Watched(1)
    config = DemonstrationConfig(episodes=120, noise=[0.0], detour=3)
    found, _ = shown(config, envs=[env])
    for image, action in zip(found.inputs["image"], found.actions, strict=True):
        assert action[0].tolist() == pytest.approx(State.read(image).label)
    executed, advice = torch.cat(env.executed), torch.cat(env.advice)
    starts = (advice[:, 2] == 0).nonzero().flatten().tolist()
    lengths = set()
    for begin, end in pairwise([*starts, len(advice)]):
        astray = (executed[begin:end] != advice[begin:end]).any(1)
        lengths.add(length := int(astray.sum()))
        assert astray[:length].all(), "at the start of the episode"
        assert length == 0 or (
            len(executed[begin : begin + length].unique(dim=0)) == 1
            and executed[begin].abs().max() <= 0.5
        )
    assert lengths == {0, 1, 2, 3}


def test_windows_hold_the_next_actions_of_the_same_episode() -> None:
    found, _ = shown(chunk=3)
    assert found.actions.shape[1:] == (3, 4)
    rows = iter(found.actions.tolist())
    for episode in by_episode(found):
        for i in range(len(episode)):
            expected = [episode[min(i + c, len(episode) - 1)].label for c in range(3)]
            assert next(rows) == [pytest.approx(label) for label in expected]


@pytest.mark.parametrize("episodes", [1, 3, 11])
def test_groups_and_environments_do_not_change_the_result(episodes: int) -> None:
    config = DemonstrationConfig(
        episodes=episodes, noise=NOISY.noise, random_actions=NOISY.random_actions
    )
    first, success = shown(config, envs=groups(4, 1))
    for envs in (groups(4, 2), groups(6, 3), groups(1, 1)):
        found, again = shown(config, envs=envs)
        assert torch.equal(found.inputs["image"], first.inputs["image"]) and torch.equal(
            found.actions, first.actions
        )
        assert again == success


def test_the_run_seed_changes_only_the_noise() -> None:
    first = by_episode(shown()[0])
    other = by_episode(shown(run_seed=1)[0])
    assert first != other and [e[0] for e in first] == [e[0] for e in other]


def test_progress_counts_finished_episodes() -> None:
    seen: list[float] = []
    collect_demonstrations(WholeImages(LinearOptions()), groups(4, 2), NOISY, 0, seen.append)
    ended = [11 * fraction for fraction in seen]
    assert seen == sorted(seen) and len(set(seen)) > 5 and seen[-1] == 1.0
    assert ended == pytest.approx([round(each) for each in ended])


def test_a_missing_expert_is_one_line() -> None:
    class Clueless(CounterWorld):
        def expert_actions(self) -> Tensor:
            raise UserError("this task has no scripted expert")

    with pytest.raises(UserError, match="no scripted expert"):
        shown(envs=[Clueless(2)])


class Unsteady(CounterWorld):
    """In the first environment the reward of an episode's third step is NaN."""

    def step_wait(self) -> StepResult:
        result = super().step_wait()
        reward = result.reward.clone()
        reward[0] += torch.where(result.observation.state[0, 1] == 3, torch.nan, 0.0)
        return replace(result, reward=reward)


def test_the_steps_before_a_fault_count(capsys: pytest.CaptureFixture[str]) -> None:
    whole = by_episode(shown(CLEAN)[0])
    found = by_episode(shown(CLEAN, envs=[GuardedEnv(Unsteady(2))])[0])
    cut = [number for number, episode in enumerate(found) if episode != whole[number]]
    assert len(found) == len(whole) and 0 < len(cut) < len(found)
    assert all(found[number] == whole[number][:2] for number in cut)
    assert (
        capsys.readouterr().err
        == f"{len(cut)} of 11 episodes of the expert were cut, because the simulator failed\n"
    )


def test_an_expert_that_never_makes_a_step_is_one_line() -> None:
    def undefined(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        return replace(result, reward=result.reward * torch.nan)

    env = GuardedEnv(RewardedEnv(CounterWorld(2), RewardShaper(undefined)))
    with pytest.raises(Failure, match="in every episode of the expert before its first step"):
        shown(replace(CLEAN, episodes=4), envs=[env])
