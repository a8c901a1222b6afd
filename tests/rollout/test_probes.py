"""Probes on counter world: what they change, what they leave, and that episodes stay paired."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf_vla.config.recipe import (
    BLANK_IMAGE,
    BLANK_INSTRUCTION,
    FROZEN_IMAGE,
    PROBES,
    SHUFFLED_INSTRUCTION,
)
from rlinf_vla.core.types import Episodes, Inputs, Observation, StepResult
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_evaluation
from rlinf_vla.rollout.probes import GREY, ProbedEnv, shuffled
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.testing.toy_env import CounterWorld, groups
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

EPISODES = 24
LANGUAGE = (BLANK_INSTRUCTION, SHUFFLED_INSTRUCTION)
VISION = (BLANK_IMAGE, FROZEN_IMAGE)


class Blind(LinearPolicy):
    """Reads neither images nor the instruction: its input is the state."""

    def prepare(self, obs: Observation) -> Inputs:
        level = (128 + 40 * obs.state[:, :1]).byte()[:, None, None].expand(-1, 8, 8, 3)
        return {"image": level.contiguous()}


class Reader(Blind):
    """Reads the instruction as well: where each of its letters is, all over its input."""

    def prepare(self, obs: Observation) -> Inputs:
        found = super().prepare(obs)["image"].clone().flatten(1)
        for row, text in enumerate(obs.instruction):
            letters = torch.tensor([53 * ord(each) % 256 for each in text], dtype=torch.uint8)
            found[row, 1:] = letters.repeat(192)[:191] if text else 0
        return {"image": found.view(-1, 8, 8, 3)}


def play(
    kind: type[LinearPolicy], probe: str | None, envs: list[CounterWorld] | None = None
) -> list[EpisodeResult]:
    actor = Actor(kind(LinearOptions(chunk=2)), Settings(run_seed=4, temperature=1.0, batch_size=2))
    return play_evaluation(actor, envs or groups(4, 2), range(EPISODES), Timeline(), probe=probe)


def outcomes(results: list[EpisodeResult]) -> list[EpisodeResult]:
    """Without the instruction, which names what the policy was given."""
    return [replace(each, instruction="") for each in results]


@pytest.mark.parametrize("probe", PROBES)
def test_a_policy_that_reads_neither_is_unaffected(probe: str) -> None:
    assert outcomes(play(Blind, probe)) == outcomes(play(Blind, None))


@pytest.mark.parametrize(("kind", "affecting"), [(LinearPolicy, VISION), (Reader, LANGUAGE)])
def test_a_policy_is_affected_by_the_probes_of_what_it_reads(
    kind: type[LinearPolicy], affecting: tuple[str, ...]
) -> None:
    plain = outcomes(play(kind, None))
    assert [probe for probe in PROBES if outcomes(play(kind, probe)) != plain] == [
        probe for probe in PROBES if probe in affecting
    ]


@pytest.mark.parametrize("probe", PROBES)
def test_episodes_stay_paired(probe: str) -> None:
    with_it, without = groups(4, 2), groups(4, 2)
    found = play(Reader, probe, with_it)
    plain = play(Reader, None, without)
    assert [(each.task, each.seed) for each in found] == [(each.task, each.seed) for each in plain]
    assert {each for env in with_it for each in env.played} == {
        each for env in without for each in env.played
    }
    assert play(Reader, probe, groups(8, 1)) == found, "however episodes are grouped"


@pytest.mark.parametrize(("probe", "words"), [(BLANK_INSTRUCTION, 0), (SHUFFLED_INSTRUCTION, 3)])
def test_a_result_names_the_instruction_that_the_policy_was_given(probe: str, words: int) -> None:
    found = [each.instruction for each in play(Reader, probe) if each.task == "Low"]
    assert all(len(each.split()) == words and each != "push the cube" for each in found)


def test_words_are_shuffled_by_the_episode_and_never_in_their_order() -> None:
    def episode(seed: int, task: int = 0) -> Episodes:
        return Episodes.first_attempts(torch.tensor([task]), torch.tensor([seed]))

    text = "stack the red cube on the green cube"
    found = {seed: shuffled(text, episode(seed)) for seed in range(40)}
    assert all(
        sorted(each.split()) == sorted(text.split()) and each != text for each in found.values()
    )
    assert len(set(found.values())) > 30 and found[3] == shuffled(text, episode(3)) != shuffled(
        text, episode(3, task=1)
    )
    assert {shuffled("push it", episode(seed)) for seed in range(20)} == {"it push"}
    assert shuffled("push", episode(0)) == "push" and shuffled("", episode(0)) == ""


class WithJpeg(CounterWorld):
    """Shows its images once more, as if after JPEG."""

    def reset_wait(self) -> Observation:
        return self.told(super().reset_wait())

    def step_wait(self) -> StepResult:
        result = super().step_wait()
        return replace(result, observation=self.told(result.observation))

    def told(self, observation: Observation) -> Observation:
        return replace(observation, jpeg={"base": observation.images["base"] ^ 1})


def test_images_are_frozen_at_the_first_of_each_episode() -> None:
    env = ProbedEnv(WithJpeg(3), FROZEN_IMAGE)
    plain = WithJpeg(3)
    first = Episodes.first_attempts(torch.tensor([0, 1, 0]), torch.tensor([3, 4, 6]))
    then = Episodes.first_attempts(torch.tensor([0, 0, 0]), torch.tensor([9, 9, 9]))
    mask = torch.tensor([False, True, False])
    up = torch.tensor([1.0, 0, 0, 0]).expand(3, 1, 4)
    nothing = torch.zeros(3, 1, 4)
    shown, begin = env.reset(first), plain.reset(first)
    assert torch.equal(shown.images["base"], begin.images["base"]) and torch.equal(
        shown.jpeg["base"], begin.jpeg["base"]
    )
    for actions in (up, nothing):
        result, real = env.step(actions), plain.step(actions)
        assert torch.equal(result.observation.images["base"], begin.images["base"])
        assert torch.equal(result.observation.jpeg["base"], begin.jpeg["base"])
        assert torch.equal(result.observation.state, real.observation.state), (
            "only images are frozen"
        )
    again, fresh = env.reset(then, mask), plain.reset(then, mask)
    assert torch.equal(again.images["base"][1], fresh.images["base"][1]), (
        "a new episode shows its own first image"
    )
    assert torch.equal(again.images["base"][[0, 2]], begin.images["base"][[0, 2]]), (
        "the others go on"
    )
    assert not torch.equal(fresh.images["base"][0], begin.images["base"][0])
    assert torch.equal(env.step(nothing).observation.images["base"], again.images["base"])
    plain.step(nothing)
    assert torch.equal(env.render(0), plain.render(0)), "viewers see what is there"


def test_blank_images_are_grey() -> None:
    env = ProbedEnv(WithJpeg(2), BLANK_IMAGE)
    shown = env.reset(Episodes.first_attempts(torch.tensor([0, 1]), torch.tensor([3, 4])))
    assert all(
        each.dtype == torch.uint8 and bool((each == GREY).all())
        for each in (shown.images["base"], shown.jpeg["base"])
    )
    assert shown.instruction == ["push the cube", "stack the red cube on the green cube"]
