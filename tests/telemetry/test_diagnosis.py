"""Verdicts on made-up series of metrics: broken ones are found, healthy and recorded ones are not accused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.evaluation.statistics import summary
from rlinf_vla.telemetry import diagnosis
from rlinf_vla.telemetry.diagnosis import RULES, Verdict, verdicts
from rlinf_vla.telemetry.run_files import Run

ROOT = Path(__file__).parents[2]
Series = dict[str, Any]
"""Metric -> its value in every iteration, or a function of the iteration."""

COMMON: Series = {
    "rollout/success_once": lambda i: 0.3 + 0.03 * i,
    "rollout/return_min": -0.1,
    "rollout/return_max": 1.0,
    "rollout/episodes": 64,
    "rollout/gripper_closed": 0.4,
    "rollout/actions_at_bounds": 0.2,
    "rollout/state_outliers": 0.02,
}
ON_POLICY: Series = COMMON | {
    "actor/approx_kl": 0.015,
    "actor/clip_fraction": 0.15,
    "actor/entropy_each": lambda i: 1.2 - 0.03 * i,
    "actor/grad_norm": 2.0,
    "actor/clipped_steps": 1.0,
}
PPO: Series = ON_POLICY | {"critic/explained_variance": lambda i: 0.0 if i == 0 else 0.1 + 0.03 * i}
GRPO: Series = ON_POLICY | {"grpo/frac_informative": 0.8, "grpo/groups": 8}
SAC: Series = COMMON | {"actor/entropy": -4.0, "critic/vf_loss": 0.1}
SFT: Series = {
    "sft/loss": lambda i: 2.0 / (i + 1),
    "actor/grad_norm": 3.0,
    "actor/clipped_steps": 0.9,
}

ALGORITHMS: dict[str, Series] = {"ppo": PPO, "grpo": GRPO, "sac": SAC, "sft": SFT}
RECIPE = {
    "name": "made_up",
    "iterations": 12,
    "episodes": 100,
    "algorithm": {
        "learning_rate": 3e-4,
        "value_learning_rate": 1e-3,
        "value_warmup": 0,
        "value_coef": 0.5,
        "epochs": 3,
        "target_kl": 0.08,
        "max_grad_norm": 0.5,
        "entropy_coef": 0.0,
        "group_size": 8,
        "episodes": 64,
        "resample": 0,
        "uninformative": "dropped",
        "sft_coef": 0.0,
    },
    "env": {"name": "made_up", "reward": "sparse", "episode_limit": 30},
    "reward": {"name": None, "weight": 1.0, "env_weight": 0.0},
    "rollout": {"temperature": 1.0},
    "model": {
        "checkpoint": "x",
        "options": {"gripper": "open_positive", "unnorm_key": None, "std": 0.5},
    },
}


def made_up(series: Series, iterations: int = 12, seed: int = 0, noise: float = 0.1) -> Run:
    """A run with these series, each number of which varies by a share of ``noise``."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for i in range(iterations):
        row: dict[str, Any] = {"step": i + 1, "time": "2026-11-30T10:00:00+00:00"}
        for name, value in series.items():
            number = value(i) if callable(value) else value
            row[name] = None if number is None else number * (1 + noise * draw.uniform(-1, 1))
        rows.append(row)
    return Run("made_up", metrics=rows, recipe=RECIPE)


def evaluated(run: Run, rate: float, episodes: int = 100, mode: str = "sampled") -> Run:
    outcomes = [{"task": "a", "seed": i, "success": i < rate * episodes} for i in range(episodes)]
    run.evaluations["after"] = {mode: summary(outcomes, "task")}
    return run


def accused(run: Run) -> list[str]:
    return [verdict.name for verdict in verdicts(run) if verdict.conspicuous]


FAILING: Series = {"rollout/success_once": 0.0}
BROKEN: dict[str, tuple[str, Series]] = {
    "no reward at all": (
        "reward never seen",
        PPO | FAILING | {"rollout/return_min": 0.0, "rollout/return_max": 0.0},
    ),
    "a penalty of time alone": (
        "reward never seen",
        GRPO | {"rollout/return_min": lambda i: -30.0, "rollout/return_max": lambda i: -30.0},
    ),
    "success without a reward": (
        "reward never seen",
        SAC | {"rollout/return_min": 0.0, "rollout/return_max": 0.0},
    ),
    "no attempt succeeds": ("all-equal groups", GRPO | FAILING | {"grpo/frac_informative": 0.0}),
    "hardly any attempt succeeds": (
        "all-equal groups",
        GRPO | {"rollout/success_once": 0.02, "grpo/frac_informative": 0.15},
    ),
    "greedy attempts": (
        "all-equal groups",
        GRPO | {"rollout/success_once": 0.5, "grpo/frac_informative": 0.0},
    ),
    "groups become alike": (
        "all-equal groups",
        GRPO | {"grpo/frac_informative": lambda i: 0.9 if i < 5 else 0.1},
    ),
    "a critic that does not learn": ("dead critic", PPO | {"critic/explained_variance": 0.0}),
    "a critic that overshoots": ("dead critic", PPO | {"critic/explained_variance": -1.5}),
    "a critic that dies": (
        "dead critic",
        PPO | {"critic/explained_variance": lambda i: 0.4 if i < 5 else -0.2},
    ),
    "large steps": ("KL out of range", PPO | {"actor/approx_kl": 0.4}),
    "steps that become large": (
        "KL out of range",
        GRPO | {"actor/approx_kl": lambda i: 0.01 if i < 6 else 2.0},
    ),
    "most ratios clipped": ("ratio out of range", PPO | {"actor/clip_fraction": 0.7}),
    "more and more ratios clipped": (
        "ratio out of range",
        GRPO | {"actor/clip_fraction": lambda i: 0.08 * i},
    ),
    "tokens that no longer vary": (
        "entropy collapse",
        PPO | FAILING | {"actor/entropy_each": lambda i: 1.2 * 0.4**i},
    ),
    "sure of failing at once": (
        "entropy collapse",
        GRPO | FAILING | {"actor/entropy_each": lambda i: 1.2 if i == 0 else 0.001},
    ),
    "a narrow normal distribution": (
        "entropy collapse",
        PPO | FAILING | {"actor/entropy_each": lambda i: 0.5 - 0.4 * i},
    ),
    "an open gripper": ("gripper never closes", PPO | FAILING | {"rollout/gripper_closed": 0.0}),
    "a gripper that closes once": (
        "gripper never closes",
        SAC | FAILING | {"rollout/gripper_closed": 0.0005},
    ),
    "full speed": (
        "actions at their bounds",
        SAC | {"rollout/success_once": 0.1, "rollout/actions_at_bounds": 0.9},
    ),
    "actions that grow": (
        "actions at their bounds",
        PPO | FAILING | {"rollout/actions_at_bounds": lambda i: 0.08 * i},
    ),
    "a reward of thousands": ("clipped gradients", PPO | {"actor/grad_norm": 5e4}),
    "gradients that grow": ("clipped gradients", GRPO | {"actor/grad_norm": lambda i: 2.0 * 3**i}),
    "one number of eight": ("normalisation outliers", PPO | {"rollout/state_outliers": 0.125}),
    "another robot": ("normalisation outliers", SAC | {"rollout/state_outliers": 0.6}),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_series_is_found(name: str, seed: int) -> None:
    expected, series = BROKEN[name]
    exact = expected == "reward never seen"
    assert accused(made_up(series, seed=seed, noise=0.0 if exact else 0.1)) == [expected]


def test_success_in_rollouts_against_the_evaluation() -> None:
    rollouts = {"rollout/success_once": 0.6}
    expected = ["rollouts and evaluation differ"]
    for mode, rate, accusation in (
        ("sampled", 0.6, []),
        ("sampled", 0.5, []),
        ("sampled", 0.2, expected),
        ("sampled", 0.95, expected),
        ("greedy", 0.2, expected),
        ("greedy", 0.95, []),
    ):
        run = evaluated(made_up(PPO | rollouts), rate, mode=mode)
        assert accused(run) == accusation, (mode, rate)
    assert accused(evaluated(made_up(PPO | rollouts), 0.2, episodes=10)) == []


def test_every_rule_finds_something() -> None:
    found = {rule for rule, _ in BROKEN.values()} | {"rollouts and evaluation differ"}
    assert found == {rule.name for rule in RULES}


HEALTHY: dict[str, Series] = {
    **ALGORITHMS,
    "solved groups": GRPO | {"rollout/success_once": 0.99, "grpo/frac_informative": 0.05},
    "a solved task": PPO
    | {
        "rollout/success_once": 0.97,
        "critic/explained_variance": 0.0,
        "actor/entropy_each": lambda i: 1.2 * 0.4**i,
    },
    "a push": PPO | {"rollout/gripper_closed": 0.0},
    "full speed succeeds": SAC | {"rollout/success_once": 0.8, "rollout/actions_at_bounds": 0.9},
    "dense and negative rewards": SAC | {"rollout/return_min": -9.0, "rollout/return_max": -2.0},
    "one bad iteration": PPO
    | {
        "actor/approx_kl": lambda i: 3.0 if i == 8 else 0.01,
        "critic/explained_variance": lambda i: -4.0 if i == 9 else 0.3,
    },
    "a bad beginning": PPO
    | {
        "actor/approx_kl": lambda i: 1.0 if i < 3 else 0.01,
        "critic/explained_variance": lambda i: -1.0 if i < 3 else 0.3,
    },
    "a narrow policy from the first": PPO | {"actor/entropy_each": -3.0},
    "a density around zero": PPO | {"actor/entropy_each": lambda i: 0.5 - 0.1 * i},
    "a first success after half of the run": GRPO
    | {
        "rollout/success_once": lambda i: 0.0 if i < 7 else 0.2,
        "rollout/return_max": lambda i: 0.0 if i < 7 else 1.0,
        "rollout/return_min": 0.0,
    },
    "numbers that are not finite": PPO
    | {"critic/explained_variance": None, "actor/approx_kl": None},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(HEALTHY))
def test_a_healthy_series_is_not_accused(name: str, seed: int) -> None:
    assert accused(made_up(HEALTHY[name], seed=seed)) == []


def recorded() -> list[tuple[str, Run]]:
    """The recorded runs of docs/results/learning: success in rollouts, and the evaluation after."""
    runs = []
    for path in sorted((ROOT / "docs" / "results" / "learning").glob("*.json")):
        for seed, found in json.loads(path.read_text())["seeds"].items():
            run = made_up(
                {"rollout/success_once": found["curve"].__getitem__}, len(found["curve"]), noise=0
            )
            for mode, tasks in found["after"].items():
                outcomes = [
                    {"task": task, "seed": number, "success": key == "succeeded"}
                    for task, parts in tasks.items()
                    for key, numbers in parts.items()
                    for number in numbers
                ]
                run.evaluations.setdefault("after", {})[mode] = summary(outcomes, "task")
            runs.append((f"{path.stem} {seed}", run))
    return runs


def test_no_recorded_run_is_accused() -> None:
    runs = recorded()
    assert len(runs) >= 30
    for name, run in runs:
        (verdict,) = verdicts(run)
        assert not verdict.conspicuous, name


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_verdict_names_its_number_and_keys_of_the_run(name: str) -> None:
    expected, series = BROKEN[name]
    (verdict,) = (each for each in verdicts(made_up(series, noise=0)) if each.conspicuous)
    assert verdict.name == expected and verdict.keys and 1 <= verdict.first < verdict.last == 12
    assert any(character.isdigit() for character in verdict.number)
    for advice in verdict.keys:
        node: Any = RECIPE
        for part in advice.key.split("."):
            node = node[part]
        assert node == advice.now and advice.value != str(node)


def only(series: Series, name: str) -> Verdict:
    return next(each for each in verdicts(made_up(series, noise=0)) if each.name == name)


@pytest.mark.parametrize(
    ("rule", "metric", "limit", "above"),
    [
        ("all-equal groups", "grpo/frac_informative", diagnosis.INFORMATIVE, False),
        ("dead critic", "critic/explained_variance", diagnosis.EXPLAINED, False),
        ("KL out of range", "actor/approx_kl", diagnosis.KL, True),
        ("ratio out of range", "actor/clip_fraction", diagnosis.CLIPPED_RATIOS, True),
        ("actions at their bounds", "rollout/actions_at_bounds", diagnosis.AT_BOUNDS, True),
        ("clipped gradients", "actor/grad_norm", 0.5 * diagnosis.SHRUNK, True),
        ("normalisation outliers", "rollout/state_outliers", diagnosis.OUTLIERS, True),
    ],
)
def test_a_limit_is_where_it_says(rule: str, metric: str, limit: float, above: bool) -> None:
    series = PPO | GRPO | {"rollout/success_once": 0.3}
    for factor in (0.99, 1.01):
        beyond = (factor > 1) is above
        assert only(series | {metric: factor * limit}, rule).conspicuous is beyond


def test_a_larger_target_kl_is_the_limit() -> None:
    run = made_up(PPO | {"actor/approx_kl": 0.3}, noise=0)
    run.recipe = RECIPE | {"algorithm": RECIPE["algorithm"] | {"target_kl": 0.5}}  # type: ignore[operator]
    assert accused(run) == []


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_a_run_that_just_began_has_no_verdict(iterations: int) -> None:
    assert verdicts(made_up(BROKEN["large steps"][1], iterations)) == []


def test_lines_of_evaluations_are_not_iterations() -> None:
    run = made_up(PPO, 4)
    run.metrics = [{"step": 0, "time": "", "eval/success_once": 0.1}, *run.metrics]
    run.metrics.append({"step": 4, "time": "", "eval/success_once": 0.2})
    assert accused(run) == [] and {verdict.last for verdict in verdicts(run)} == {4}


def test_advice_that_the_run_follows_already_is_left_out() -> None:
    run = made_up(PPO | {"actor/approx_kl": 0.4}, noise=0)
    run.recipe = {"algorithm": {"learning_rate": 3e-4, "target_kl": 0.08, "epochs": 1}}
    (verdict,) = (each for each in verdicts(run) if each.conspicuous)
    assert [str(advice) for advice in verdict.keys] == [
        "algorithm.learning_rate=9e-05 (now 0.0003)"
    ]


@pytest.mark.parametrize(
    "recipe",
    [{}, {"algorithm": 3}, {"algorithm": {"max_grad_norm": "x", "epochs": []}}, {"episodes": True}],
)
def test_a_recipe_that_is_none_gives_fewer_keys(recipe: dict[str, Any]) -> None:
    run = made_up(PPO | {"actor/approx_kl": 0.4}, noise=0)
    run.recipe = recipe
    run.evaluations["after"] = {
        "sampled": {"pc_success": "x", "pc_success_ci95": 3, "n_episodes": None}
    }
    assert "KL out of range" in accused(run)


def test_whole_numbers_stay_whole() -> None:
    (verdict,) = (
        each for each in verdicts(made_up(BROKEN["greedy attempts"][1])) if each.conspicuous
    )
    advised = {advice.key: advice.value for advice in verdict.keys}
    assert advised["algorithm.episodes"] == "128" and advised["algorithm.group_size"] == "16"
