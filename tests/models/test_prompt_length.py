"""Prompts are as long as the environment's instructions need, unless the recipe sets their length."""

from __future__ import annotations

import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Observation
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from tests.models.tiny_openvla import ASSETS, tiny

LONG = "put both the red cube and the blue cube on the plate " * 5


def openvla(**options: int) -> Policy:
    return tiny(**options)


def pi0(**options: int) -> Policy:
    return Pi0Policy.load(ASSETS / "pi0_tiny", Pi0Options(random_weights=True, **options))  # type: ignore[arg-type]


def ids(policy: Policy, instruction: str) -> torch.Tensor:
    images = {
        name: torch.zeros(1, *size, 3, dtype=torch.uint8)
        for name, size in policy.spec.images.items()
    }
    return policy.prepare(
        Observation(images, torch.zeros(1, policy.spec.state_dim), [instruction])
    )["token_ids"]


@pytest.mark.parametrize(("make", "default"), [(openvla, 32), (pi0, 48)])
def test_null_is_the_usual_length_or_what_the_longest_instruction_needs(
    make: type, default: int
) -> None:
    policy = make()
    assert ids(policy, "push").shape == (1, default)
    policy.fit_instructions(["push", "pull"])
    assert ids(policy, "push").shape == (1, default), (
        "never shorter: the bits of a run stay as they were"
    )
    with pytest.raises(UserError, match=r"model\.options\.prompt_length"):
        ids(policy, LONG)
    policy.fit_instructions(["push", LONG])
    assert (
        ids(policy, LONG).shape == ids(policy, "push").shape
        and ids(policy, LONG).shape[1] > default
    )
    policy.fit_instructions(["push"])
    assert ids(policy, "push").shape == (1, default), (
        "it depends on this environment's instructions alone"
    )


@pytest.mark.parametrize("make", [openvla, pi0])
def test_a_length_in_the_recipe_that_is_too_short_is_refused_before_the_run(make: type) -> None:
    policy = make(prompt_length=40)
    with pytest.raises(
        UserError, match=r"takes \d+ tokens, model.options.prompt_length is 40: set .*=\d+ or more"
    ):
        policy.fit_instructions(["push", LONG])
    policy.fit_instructions(["push"])
    assert ids(policy, "push").shape == (1, 40)
