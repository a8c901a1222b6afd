"""A teacher that does not fit its student is refused in one line, before the first rollout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.runtime import builders, hub, recipes
from rlinf_vla.runtime.teacher import load_teacher, unlike
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

OPENVLA = "asset://openvla_tiny_pushcube"


def read(*keys: str) -> Recipe:
    words = ["recipe=maniskill_dagger", "algorithm.beta=null", "cluster=laptop", *keys]
    return recipes.read(compose.load("train", words))


def require_trainable(recipe: Recipe) -> None:
    builders.require_trainable(recipe, builders.build_algorithm(recipe))


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (["algorithm.teacher=exprt"], "algorithm.teacher=exprt is not there: give the directory"),
        (
            [
                "model=pi0",
                "model.checkpoint=asset://pi0_tiny_pushcube",
                "algorithm.teacher=asset://pi0_tiny_pushcube",
                "algorithm.loss=forward_kl",
            ],
            "algorithm.loss=forward_kl: model=pi0 draws no number of an action from a distribution "
            "in closed form: set algorithm.loss=imitation",
        ),
        (
            [
                "model=openvla_oft",
                "model.checkpoint=asset://openvla_oft_plus_tiny",
                "model.options.head=l1",
                "model.options.random_weights=true",
                f"algorithm.teacher={OPENVLA}",
                "algorithm.loss=reverse_kl",
            ],
            "model=openvla_oft has no distribution with model.options.head=l1",
        ),
        (
            [f"algorithm.teacher={OPENVLA}"],
            f"algorithm.teacher={OPENVLA} cannot be read as model=compact with its model.options (",
        ),
        (
            [
                "model=openvla",
                "model.checkpoint=asset://openvla_tiny",
                "algorithm.teacher=asset://pi0_tiny_pushcube",
            ],
            "): give a teacher of the student's model",
        ),
    ],
)
def test_it_is_refused(keys: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as found:
        require_trainable(read(*keys))
    assert complaint in str(found.value) and "\n" not in str(found.value)


def test_a_teacher_of_another_robot_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = json.loads((recipes.asset_path("asset://compact") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"action_dim": 7}))
    with pytest.raises(UserError, match="has action_dim=7, the policy 4: choose a teacher that is"):
        require_trainable(read(f"algorithm.teacher={tmp_path}"))


class Dimmed(LinearPolicy):
    def prepare(self, obs: Observation) -> Inputs:
        return {name: value // 2 for name, value in super().prepare(obs).items()}


@pytest.mark.parametrize(
    ("teacher", "difference"),
    [
        (LinearPolicy(LinearOptions(chunk=2, seed=3)), None),
        (LinearPolicy(LinearOptions(chunk=3)), "has chunk=3, the policy 2"),
        (LinearPolicy(LinearOptions(chunk=2, bins=4)), "chooses from other numbers"),
        (Dimmed(LinearOptions(chunk=2)), "is given another input image than the policy"),
    ],
)
def test_what_differs_is_found(teacher: LinearPolicy, difference: str | None) -> None:
    found = unlike(teacher, LinearPolicy(LinearOptions(chunk=2)), "forward_kl")
    assert found is None if difference is None else (found or "").startswith(difference)


def test_it_is_loaded_with_its_weights_though_the_student_begins_with_random_ones() -> None:
    words = [
        "model=openvla",
        "model.checkpoint=asset://openvla_tiny",
        f"algorithm.teacher={OPENVLA}",
    ]
    recipe = read(*words)
    assert recipe.model.options.random_weights
    teacher = load_teacher(recipe)
    student = builders.build_policy(recipe)
    assert teacher is not None and not any(each.requires_grad for each in teacher.parameters())
    stored = type(teacher).load(Path(recipes.asset_path(OPENVLA)), type(teacher).Config())
    for name, value in stored.backbone.state_dict().items():
        assert (teacher.backbone.state_dict()[name] == value).all()
    assert unlike(teacher, student, "reverse_kl") is None


def test_a_dry_run_downloads_no_weights_of_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def download(location: str, patterns: Sequence[str] = hub.DATA) -> Path:
        assert location == "hf://org/teacher"
        asked.append(patterns)
        return recipes.asset_path(OPENVLA)

    monkeypatch.setattr(hub, "download", download)
    recipe = read(
        "model=openvla",
        f"model.checkpoint={OPENVLA}",
        "algorithm.teacher=hf://org/teacher",
    )
    MemoryModel(recipe)
    require_trainable(recipe)
    assert asked and set(asked) == {hub.DESCRIPTION}
