"""The suite of reward plug-ins: a correct one passes, and each check fails for a plug-in that breaks the protocol."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import EnvSpec, Reward, RewardModel
from rlinf_vla.core.types import Inputs, Observation, StepResult
from rlinf_vla.testing.reward import RewardConformance, last_valid


@dataclass
class Options:
    checkpoint: str | None = None
    scale: float = 0.5


class Brightness(RewardModel):
    """Linear in the mean colour of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.images = {"base": (64, 64)}
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.5]))

    def prepare(self, obs: Observation) -> Inputs:
        return {"colour": obs.images["base"].float().mean((1, 2)) / 255}

    def forward(self, inputs: Inputs) -> Tensor:
        return inputs["colour"] @ self.weight

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        (checkpoint / "weight.json").write_text(json.dumps(self.weight.tolist()))


def judge(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    """Return a reward of each valid step by its action; an episode that starts to the left ends."""
    ends = last_valid(result.valid) & (result.observation.state[:, :1] < 0)
    return replace(
        result,
        reward=torch.where(result.valid, actions[..., 0], 0.0),
        terminated=result.terminated | ends,
    )


class Plugin:
    """A correct one, except for the given changes."""

    def __init__(
        self,
        judge: Callable[..., StepResult] = judge,
        model: Callable[[], RewardModel] = Brightness,
        config: type = Options,
        name: str = "toy",
    ) -> None:
        self.judge = judge
        self.model = model
        self.Config = config
        self.name = name

    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        if "base" not in env.images:
            raise UserError("reward=toy needs an image 'base'")
        return self.judge

    def learner(self, config: Any) -> RewardModel:
        model = self.model()
        if config.checkpoint is not None:
            saved = json.loads((Path(config.checkpoint) / "weight.json").read_text())
            model.load_state_dict({"weight": torch.tensor(saved)})
        return model


class TestRight(RewardConformance):
    plugin = Plugin()


class TestWithoutModel(RewardConformance):
    class WithoutModel(Plugin):
        def learner(self, config: Any) -> RewardModel:
            raise UserError("reward=toy has no model to train")

    plugin = WithoutModel()


def but(**changes: Callable[[Observation, Tensor, StepResult], Any]) -> Plugin:
    """Return the plug-in whose result differs in these fields, each a function of the arguments."""

    def wrong(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        return replace(
            judge(before, actions, result),
            **{name: change(before, actions, result) for name, change in changes.items()},
        )

    return Plugin(wrong)


class Chatty(Plugin):
    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        if "base" not in env.images:
            raise UserError("no image 'base'\n\n... and a page of advice")
        return self.judge


class Careless(Plugin):
    def create(self, config: Any, env: EnvSpec, device: torch.device) -> Reward:
        env.images["base"]
        return self.judge


@dataclass
class Crooked(Options):
    """Does not survive a recipe file."""

    def __post_init__(self) -> None:
        self.scale += 1


@dataclass
class WithoutDefault:
    checkpoint: str


def in_place(before: Observation, actions: Tensor, result: StepResult) -> StepResult:
    result.reward.mul_(result.valid)
    before.state.zero_()
    return judge(before, actions, result)


class Counting:
    calls = 0

    def __call__(self, before: Observation, actions: Tensor, result: StepResult) -> StepResult:
        self.calls += 1
        return replace(
            judge(before, actions, result), reward=torch.full(result.valid.shape, float(self.calls))
        )


class Wide(Brightness):
    def forward(self, inputs: Inputs) -> Tensor:
        return super().forward(inputs)[:, None]


class OfTheBatch(Brightness):
    def forward(self, inputs: Inputs) -> Tensor:
        return super().forward(inputs) - super().forward(inputs).mean()


class Frozen(Brightness):
    def forward(self, inputs: Inputs) -> Tensor:
        return super().forward(inputs).detach() + 0 * self.weight.sum()


class OtherCamera(Brightness):
    def __init__(self) -> None:
        super().__init__()
        self.images = {"wrist": (64, 64)}


class Forgetful(Brightness):
    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        (checkpoint / "weight.json").write_text("[0, 0, 0]")


SHAPES = "test_shapes_types_and_device"
OTHERS = "test_it_changes_nothing_but_reward_and_terminated"
ENDS = "test_it_ends_an_episode_in_the_last_valid_step_only"
INVALID = "test_invalid_steps_are_ignored"
SAME, ROWS = "test_it_is_deterministic", "test_a_row_does_not_depend_on_others"
MODEL = "test_its_model_scores_and_learns"
IMAGES = "test_an_environment_that_lacks_its_images_is_refused_in_one_line"
RECIPE = "test_its_options_fit_into_a_recipe"
BROKEN = {
    "a reward per call": (but(reward=lambda b, a, r: r.reward.sum(1)), SHAPES),
    "float64": (but(reward=lambda b, a, r: r.reward.double()), SHAPES),
    "not finite": (but(reward=lambda b, a, r: torch.where(r.success, torch.inf, 0.0)), SHAPES),
    "a gradient": (but(reward=lambda b, a, r: r.reward.clone().requires_grad_()), SHAPES),
    "flags as numbers": (but(terminated=lambda b, a, r: r.terminated.float()), SHAPES),
    "another success": (but(success=lambda b, a, r: r.valid), OTHERS),
    "no truncation": (but(truncated=lambda b, a, r: torch.zeros_like(r.valid)), OTHERS),
    "the observation before": (but(observation=lambda b, a, r: b), OTHERS),
    "writes into its arguments": (Plugin(in_place), "test_its_arguments_stay_as_they_were"),
    "goes on after an end": (but(terminated=lambda b, a, r: torch.zeros_like(r.valid)), ENDS),
    "ends where nothing was executed": (
        but(terminated=lambda b, a, r: r.terminated | ~r.valid),
        ENDS,
    ),
    "ends in the middle": (but(terminated=lambda b, a, r: r.terminated | r.success), ENDS),
    "sums over invalid steps": (
        but(reward=lambda b, a, r: a[..., 0].mean(1, keepdim=True).expand(r.valid.shape)),
        INVALID,
    ),
    "counts success of invalid steps": (
        but(reward=lambda b, a, r: r.success.float().cumsum(1).flip(1)),
        INVALID,
    ),
    "ends by invalid steps": (
        but(
            terminated=lambda b, a, r: (
                r.terminated | (last_valid(r.valid) & (r.success & ~r.valid).any(1, keepdim=True))
            )
        ),
        INVALID,
    ),
    "chance": (but(reward=lambda b, a, r: torch.rand(r.valid.shape)), SAME),
    "draws without need": (but(reward=lambda b, a, r: torch.rand(r.valid.shape) * 0), SAME),
    "remembers its calls": (Plugin(Counting()), SAME),
    "relative to the batch": (but(reward=lambda b, a, r: a[..., 0] - a[..., 0].mean()), ROWS),
    "ends with its neighbours": (
        but(terminated=lambda b, a, r: r.terminated | (last_valid(r.valid) & (len(r.valid) > 3))),
        ROWS,
    ),
    "pages of advice": (Chatty(), IMAGES),
    "a traceback": (Careless(), IMAGES),
    "options that change": (Plugin(config=Crooked), RECIPE),
    "options that are no dataclass": (Plugin(config=dict), RECIPE),
    "an option without a default": (Plugin(config=WithoutDefault), RECIPE),
    "no name": (Plugin(name=""), RECIPE),
    "logits of another shape": (Plugin(model=Wide), MODEL),
    "logits of the batch": (Plugin(model=OfTheBatch), MODEL),
    "a model that cannot learn": (Plugin(model=Frozen), MODEL),
    "a model of another camera": (Plugin(model=OtherCamera), MODEL),
    "a model that forgets": (Plugin(model=Forgetful), "test_its_model_is_saved_and_loaded"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_plugin_fails(mistake: str, tmp_path: Path) -> None:
    plugin, name = BROKEN[mistake]
    suite = RewardConformance()
    suite.plugin = plugin
    check = getattr(suite, name)
    config: Any = WithoutDefault("") if plugin.Config is WithoutDefault else plugin.Config()
    others = {"device": "cpu", "tmp_path": tmp_path}
    with pytest.raises((AssertionError, KeyError, TypeError)):
        check(
            config,
            **{
                key: value
                for key, value in others.items()
                if key in inspect.signature(check).parameters
            },
        )


def test_each_check_can_fail() -> None:
    checks = {name for name in vars(RewardConformance) if name.startswith("test_")}
    assert checks == {name for _, name in BROKEN.values()}
