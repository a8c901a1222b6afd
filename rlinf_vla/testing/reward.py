"""Conformance suite of a reward plug-in: what every ``core.protocols.RewardPlugin`` must do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import noise
from rlinf_vla.core.protocols import EnvSpec, Reward, RewardModel, RewardPlugin
from rlinf_vla.core.types import Observation, StepResult
from rlinf_vla.rollout.actor import rows_of

from .config import assert_recipe_node

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LENGTHS = [5, 5, 5, 3, 1, 2]
"""Valid steps of each row of ``played``."""
CHUNK = 5
TOLERANCE = 1e-5
Played = tuple[Observation, Tensor, StepResult]
"""Arguments of a reward: observation before, actions and step result."""


def observation(spec: EnvSpec, generator: torch.Generator) -> Observation:
    """Return a random observation of each row."""
    images = noise(spec.images, len(LENGTHS), generator)
    state = torch.randn(len(LENGTHS), spec.state_dim, generator=generator)
    return Observation(
        images, state, [f"put block {row} on the plate" for row in range(len(LENGTHS))]
    )


def played(spec: EnvSpec, seed: int = 0) -> Played:
    """Return one random step per row: whole chunks, and chunks that end early in every way."""
    generator = torch.Generator().manual_seed(seed)
    before, after = observation(spec, generator), observation(spec, generator)
    actions = torch.rand(len(LENGTHS), CHUNK, spec.action_dim, generator=generator) * 2 - 1
    valid = torch.arange(CHUNK) < torch.tensor(LENGTHS)[:, None]
    last = last_valid(valid)
    terminated = last & torch.tensor([False, True, False, True, False, True])[:, None]
    truncated = last & torch.tensor([False, False, True, False, True, False])[:, None]
    success = valid & (torch.rand(valid.shape, generator=generator) < 0.4)
    reward = torch.where(valid, torch.rand(valid.shape, generator=generator), 0.0)
    return before, actions, StepResult(after, reward, terminated, truncated, success, valid)


def last_valid(valid: Tensor) -> Tensor:
    """Return which step of each row is its last valid one, bool ``[B, C]``."""
    return valid & (valid.cumsum(1) == valid.sum(1, keepdim=True))


def moved(step: Played, index: Tensor | torch.device) -> Played:
    """Return some rows of a step, or all of them on another device."""

    def of(value: Tensor) -> Tensor:
        return value.to(index) if isinstance(index, torch.device) else value[index]

    def seen(observation: Observation) -> Observation:
        return (
            observation.to(index)
            if isinstance(index, torch.device)
            else rows_of(observation, index)
        )

    before, actions, result = step
    flags = (result.reward, result.terminated, result.truncated, result.success, result.valid)
    return seen(before), of(actions), StepResult(seen(result.observation), *map(of, flags))


def tensors(step: Played) -> dict[str, Tensor]:
    """Return all tensors of a step by name."""
    before, actions, result = step
    named_tensors = {
        name: getattr(result, name)
        for name in ("reward", "terminated", "truncated", "success", "valid")
    } | {"actions": actions}
    for when, observation in (("before", before), ("after", result.observation)):
        named_tensors |= {f"{when} state": observation.state} | {
            f"{when} image {name}": image for name, image in observation.images.items()
        }
    return named_tensors


class RewardConformance:
    """Subclasses set ``plugin``, and override the rest where it does not fit.

    Every test makes its own reward from the fixture ``config``.
    """

    plugin: RewardPlugin
    spec = EnvSpec(3, 4, 2, 10.0, 20, {"base": (64, 64)}, ("task",), torch.device("cpu"))
    """Of the environment that the reward is made for."""

    @pytest.fixture
    def config(self) -> Any:
        """Return the options with which to make the reward, and its model if it has one."""
        return self.plugin.Config()

    def create(self, config: Any, device: str = "cpu") -> Reward:
        return self.plugin.create(config, self.spec, torch.device(device))

    def reload(self, config: Any, directory: Path) -> RewardModel:
        """Return the model that was saved in ``directory``."""
        return self.plugin.learner(replace(config, checkpoint=str(directory)))

    def learner(self, config: Any) -> RewardModel | None:
        """Return the model that this reward trains, or None if it has none."""
        try:
            return self.plugin.learner(config)
        except UserError as error:
            assert "\n" not in str(error)
            return None

    def test_its_options_fit_into_a_recipe(self, config: Any) -> None:
        assert isinstance(self.plugin.name, str) and self.plugin.name
        assert isinstance(config, self.plugin.Config)
        self.plugin.Config()  # a recipe starts from the defaults
        assert_recipe_node(config)

    def test_an_environment_that_lacks_its_images_is_refused_in_one_line(self, config: Any) -> None:
        """A reward that reads no images accepts it."""
        try:
            self.plugin.create(config, replace(self.spec, images={}), torch.device("cpu"))
        except UserError as error:
            assert "\n" not in str(error)

    @pytest.mark.parametrize("device", DEVICES)
    def test_shapes_types_and_device(self, config: Any, device: str) -> None:
        reward = self.create(config, device)
        for target in {"cpu", device}:
            result = reward(*moved(played(self.spec), torch.device(target)))
            shape = (len(LENGTHS), CHUNK)
            assert (result.reward.shape, result.reward.dtype, result.reward.device.type) == (
                shape,
                torch.float32,
                target,
            )
            assert (
                result.terminated.shape,
                result.terminated.dtype,
                result.terminated.device.type,
            ) == (shape, torch.bool, target)
            assert result.reward[result.valid].isfinite().all() and not result.reward.requires_grad

    def test_it_changes_nothing_but_reward_and_terminated(self, config: Any) -> None:
        step = played(self.spec)
        expected = tensors(step)
        result = self.create(config)(*step)
        actual = tensors((step[0], step[1], result))
        for name in expected.keys() - {"reward", "terminated"}:
            assert torch.equal(actual[name], expected[name]), name
        assert result.observation.instruction == step[2].observation.instruction

    def test_its_arguments_stay_as_they_were(self, config: Any) -> None:
        step = played(self.spec)
        self.create(config)(*step)
        for name, value in tensors(played(self.spec)).items():
            assert torch.equal(tensors(step)[name], value), f"{name} was changed in place"

    def test_it_ends_an_episode_in_the_last_valid_step_only(self, config: Any) -> None:
        reward = self.create(config)
        for seed in range(8):
            step = played(self.spec, seed)
            before = step[2].terminated
            after = reward(*step).terminated
            assert not (before & ~after).any(), "an episode that the environment ended goes on"
            assert not (after & ~before & ~last_valid(step[2].valid)).any(), (
                "an episode ends before its last valid step"
            )

    def test_invalid_steps_are_ignored(self, config: Any) -> None:
        """Whatever stands where nothing was executed."""
        reward = self.create(config)
        for seed in range(8):
            before, actions, result = played(self.spec, seed)
            expected = reward(before, actions, result)
            other = torch.where(result.valid[..., None], actions, 7.0)
            garbage = replace(
                result,
                success=result.success | ~result.valid,
                reward=torch.where(result.valid, result.reward, 5.0),
            )
            actual = reward(before, other, garbage)
            assert torch.equal(actual.reward[result.valid], expected.reward[result.valid])
            assert torch.equal(actual.terminated & result.valid, expected.terminated & result.valid)

    def test_it_is_deterministic(self, config: Any) -> None:
        reward = self.create(config)
        other = self.create(config)
        step = played(self.spec)
        state = torch.get_rng_state()
        first = reward(*step)
        reward(*played(self.spec, seed=1))
        for again in (reward(*step), other(*step)):
            assert torch.equal(again.reward[step[2].valid], first.reward[step[2].valid])
            assert torch.equal(again.terminated, first.terminated)
        assert torch.equal(torch.get_rng_state(), state), (
            "it draws from the global random generator"
        )

    def test_a_row_does_not_depend_on_others(self, config: Any) -> None:
        reward = self.create(config)
        index = torch.tensor([4, 1, 3])
        step = played(self.spec)
        whole = reward(*step)
        part = reward(*moved(step, index))
        valid = step[2].valid[index]
        torch.testing.assert_close(
            part.reward[valid], whole.reward[index][valid], rtol=0, atol=TOLERANCE
        )
        assert torch.equal(part.terminated, whole.terminated[index])

    def test_its_model_scores_and_learns(self, config: Any) -> None:
        """Only if it has one."""
        model = self.learner(config)
        if model is None:
            return
        assert model.images.items() <= self.spec.images.items()
        inputs = model.prepare(played(self.spec)[0])
        assert all(len(value) == len(LENGTHS) for value in inputs.values())
        logits = model(inputs)
        assert (logits.shape, logits.dtype) == ((len(LENGTHS),), torch.float32)
        alone = model({name: value[2:3] for name, value in inputs.items()})
        torch.testing.assert_close(alone, logits[2:3], rtol=0, atol=TOLERANCE)
        truth = (torch.arange(len(LENGTHS)) % 2).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        before = loss(logits, truth).item()
        for _ in range(10):
            optimizer.zero_grad()
            loss(model(inputs), truth).backward()
            optimizer.step()
        assert loss(model(inputs), truth).item() < before

    @torch.no_grad()
    def test_its_model_is_saved_and_loaded(self, config: Any, tmp_path: Path) -> None:
        """Only if it has one."""
        model = self.learner(config)
        if model is None:
            return
        (tmp_path / "saved").mkdir()
        model.save(tmp_path / "saved")
        again = self.reload(config, tmp_path / "saved")
        inputs = model.prepare(played(self.spec)[0])
        assert again.images == model.images and torch.equal(again(inputs), model(inputs))
