from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_vla.algorithms.sft import SFT, SFTConfig, warmup_cosine
from rlinf_vla.config.errors import UserError


@given(st.integers(0, 50), st.integers(1, 500))
def test_the_learning_rate_rises_then_falls(warmup: int, more: int) -> None:
    total = warmup + more
    rates = [warmup_cosine(step, warmup, total) for step in range(total + 3)]
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert rates[warmup] == 1 and rates[total:] == pytest.approx([0, 0, 0])
    assert all(
        after <= before for before, after in zip(rates[warmup:], rates[warmup + 1 :], strict=False)
    )


def test_the_learning_rate_half_way_through_its_decay() -> None:
    assert warmup_cosine(60, 10, 110) == pytest.approx(0.5)
    assert warmup_cosine(35, 10, 110) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def rates(steps: list[int], iterations: int = 50_000, **keys: object) -> list[float]:
    """Learning rates of a recipe with these keys at ``steps``."""
    config = SFTConfig(**keys)  # type: ignore[arg-type]
    algorithm = SFT(config, iterations=iterations)
    return [config.learning_rate * algorithm.rate(step) for step in steps]


@pytest.mark.parametrize("decay_steps", [30_000, None])
def test_openpi_pi0_decays_on_a_cosine_to_a_tenth(decay_steps: int | None) -> None:
    found = rates(
        [0, 499, 999, 1_000, 15_500, 22_750, 30_000, 49_999],
        30_000,
        learning_rate=2.5e-5,
        warmup_steps=1_000,
        decay_steps=decay_steps,
        learning_rate_end=0.1,
    )
    quarter = 2.5e-6 + 2.25e-5 * (1 - math.sqrt(0.5)) / 2  # three quarters of the way
    middle = (2.5e-5 + 2.5e-6) / 2
    assert found == pytest.approx(
        [2.5e-8, 1.25e-5, 2.5e-5, 2.5e-5, middle, quarter, 2.5e-6, 2.5e-6], rel=1e-12
    )


def test_openpi_pi05_libero_stays_constant_after_its_warm_up() -> None:
    found = rates(
        [0, 4_999, 9_999, 10_000, 20_000, 29_999],
        30_000,
        learning_rate=5e-5,
        warmup_steps=10_000,
        learning_rate_end=1.0,
    )
    assert found == pytest.approx([5e-9, 2.5e-5, *[5e-5] * 4], rel=1e-12)
    assert found[3:] == [5e-5] * 3, "without any rounding"


def test_openvla_oft_divides_by_ten_after_100_000_steps() -> None:
    keys = {
        "learning_rate": 5e-4,
        "schedule": "step",
        "decay_steps": 100_000,
        "learning_rate_end": 0.1,
    }
    steps = [0, 5, 10, 99_999, 100_000, 150_004]
    found = rates(steps, 150_005, warmup_steps=0, **keys)
    assert found == pytest.approx([5e-4, 5e-4, 5e-4, 5e-4, 5e-5, 5e-5], rel=1e-12)
    found = rates(steps, 150_005, warmup_steps=10, **keys)
    assert found == pytest.approx([5e-5, 3e-4, 5e-4, 5e-4, 5e-5, 5e-5], rel=1e-12)


def test_a_schedule_in_a_step_needs_the_step() -> None:
    with pytest.raises(UserError, match=r"^algorithm.schedule=step .*: set algorithm.decay_steps$"):
        SFT(SFTConfig(schedule="step"), iterations=10)


def test_the_optimiser_has_the_recipes_betas_and_weight_decay() -> None:
    parameters = {"weight": torch.nn.Parameter(torch.ones(2))}
    for config, betas, decay in (
        (SFTConfig(), (0.9, 0.95), 0.01),
        (SFTConfig(adam_beta2=0.999, weight_decay=1e-10), (0.9, 0.999), 1e-10),
    ):
        group = SFT(config).optimizers(parameters)["policy"].param_groups[0]
        assert (group["betas"], group["weight_decay"], group["eps"]) == (betas, decay, 1e-8)
