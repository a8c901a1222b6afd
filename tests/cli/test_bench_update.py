"""``rlinf-vla bench update`` as a user runs it: a tiny policy, no simulator, and no check of speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.feature_policy import Critics
from rlinf_vla.benchmarks import update_on_policy, update_soft
from rlinf_vla.cli import compose
from rlinf_vla.core.types import Inputs
from rlinf_vla.features.planner.synthetic import synthetic_batch, with_frozen_weights
from rlinf_vla.features.planner.work import work
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.runtime.workers.trainer import OnPolicyUpdater
from rlinf_vla.testing.toy_policy import LinearPolicy
from tests.cli.conftest import CommandLine, Counting


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_on_policy, "REPEATS", 1)
    for name, value in {"WARMUP": 0, "CALLS": 1, "REPLAY_BYTES": 100_000, "BLOCK": 16}.items():
        monkeypatch.setattr(update_soft, name, value)


def bench(
    rlinf_vla: CommandLine, counting: Counting, recipe: str, *overrides: str
) -> tuple[dict[str, Any], str]:
    _, *rest = counting.arguments("bench", recipe, "run_dir=bench", *overrides)
    found = rlinf_vla("bench", "update", *rest)
    assert found.code == 0, found.out + found.err
    assert counting.plugin.created == [], "no simulator is started"
    assert "numbers: bench/bench_update.json" in found.out
    document = json.loads(Path("bench/bench_update.json").read_text())
    assert all(each["per_s"] > 0 and each["best_s"] > 0 for each in document["rates"].values())
    assert all(difference < 1e-3 for difference in document["differences"].values())
    assert (
        document["environment"]["packages"]["torch"]
        and document["weights"] >= document["trained"] > 0
    )
    return document, found.out


@pytest.mark.parametrize(
    ("overrides", "split"),
    [
        ((), "micro-batches of 2"),
        (("cluster.micro_batch_size=4", "rollout.batch_size=2"), "micro-batches of 4"),
    ],
)
def test_ppo_with_and_without_micro_batches(
    rlinf_vla: CommandLine, counting: Counting, overrides: tuple[str, ...], split: str
) -> None:
    document, out = bench(rlinf_vla, counting, "counting_ppo", *overrides)
    whole = "whole minibatches"
    assert list(document["rates"]) == list(document["memory"]) == [whole, split]
    assert list(document["ratios"]) == [f"{split} / {whole}"] and f"{split} / {whole}: " in out
    rate, memory = document["rates"][whole], document["memory"][whole]
    assert rate["unit"] == "policy calls" and rate["per_s"] * rate["best_s"] == pytest.approx(
        2 * 10 * 2
    ), "minibatches, their size, epochs"
    assert memory["expected"] == sum(
        memory[part] for part in ("weights", "gradients", "optimizer", "activations", "data")
    )
    assert (
        memory["gradients"] == 4 * document["trained"]
        and memory["optimizer"] == 2 * memory["gradients"]
    )
    assert rate["reached"]["mfu"] > 0 and rate["reached"]["of_roofline"] > 0
    assert 0 < document["memory"][split]["activations"] < memory["activations"]
    assert (
        memory["peak"] >= memory["weights"] + memory["data"]
        and f"{whole}: peak / expected memory" in out
    )


@pytest.mark.slow
def test_the_frozen_part_is_computed_once_or_in_each_epoch(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def precompute(self: LinearPolicy, inputs: Inputs) -> Inputs:
        calls.append(len(inputs["image"]))
        return dict(inputs)

    monkeypatch.setattr(LinearPolicy, "precompute", precompute)
    document, _ = bench(rlinf_vla, counting, "counting_ppo")
    assert list(document["ratios"])[1] == "without reuse_frozen / whole minibatches"
    each, once = (
        document["memory"][name]["data"] for name in ("without reuse_frozen", "whole minibatches")
    )
    assert each < once and sum(calls) > 0
    assert (
        "without reuse_frozen"
        not in bench(rlinf_vla, counting, "counting_ppo", "algorithm.epochs=1")[0]["rates"]
    )


@pytest.mark.parametrize("model", [(), pytest.param(("model=pi0",), marks=pytest.mark.slow)])
def test_the_work_of_an_update_is_that_of_its_passes_without_recomputation(
    model: tuple[str, ...],
) -> None:
    """It is counted on the meta device; here it is compared with a real update on the CPU."""
    few = (
        "algorithm.minibatch_size=6",
        "cluster.micro_batch_size=4",
        "rollout.batch_size=4",
        "cluster=laptop",
    )
    recipe = with_frozen_weights(
        recipes.read(compose.load("train", ["recipe=maniskill_ppo", *model, *few]))
    )
    policy, algorithm = builders.build_policy(recipe), builders.build_algorithm(recipe)
    batch = synthetic_batch(recipe, policy, algorithm, 2 * recipe.algorithm.minibatch_size)
    trainer = builders.build_trainer(recipe, policy)
    settings = builders.actor_settings(recipe, recipe.rollout.temperature)
    updater = OnPolicyUpdater(
        trainer, settings.run_seed, settings.temperature, recipe.cluster.reuse_frozen
    )
    updater.update(batch, algorithm, False, 0, 0)  # it also checks the log-probabilities
    real = work(lambda: updater.update(batch, algorithm, False, 1, 0), policy.parameters())
    found = update_on_policy.model_work(recipe)
    assert found is not None and found.flops == real.flops
    again = update_on_policy.model_work(
        replace(recipe, cluster=replace(recipe.cluster, gradient_checkpointing=True))
    )
    assert again is not None and again.flops == found.flops


def test_grpo_has_no_critic_and_a_reference(rlinf_vla: CommandLine, counting: Counting) -> None:
    document, _ = bench(rlinf_vla, counting, "counting_grpo", "algorithm.kl_coef=0.1")
    memory = document["memory"]["whole minibatches"]
    assert memory["optimizer"] == 3 * memory["gradients"]


def test_sac_and_its_parts(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> None:
    document, out = bench(rlinf_vla, counting, "counting_sac")
    rates = document["rates"]
    assert {name: rate["unit"] for name, rate in rates.items()} == {
        "critics and actor": "transitions",
        "critics alone": "transitions",
        "sample of the replay": "MB",
        "record by record": "MB",
        "copy in memory": "MB",
        "ensemble of critics": "transitions",
        "critics one by one": "transitions",
    }
    assert {name for name, rate in rates.items() if rate["reached"]} == {
        "critics and actor",
        "critics alone",
    }
    assert (
        rates["critics and actor"]["reached"]["mfu"] > 0
        and document["limits"]["source"] == "measured"
        and "of roofline" in out
    )
    assert "ensemble / critics one by one: " in out and "replay / record by record: " in out
    assert sorted(path.name for path in (tmp_path / "bench").iterdir()) == ["bench_update.json"], (
        "the replay is gone"
    )


def test_separate_critics_give_the_same_values() -> None:
    critics = Critics(4, 9, 8)
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    found: Tensor = torch.stack([member(x)[:, 0] for member in update_soft.separate(critics)])
    torch.testing.assert_close(found, critics(x[:, :7], x[:, None, 7:]))


def test_an_ensemble_with_other_values_is_a_failure(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate = update_soft.separate
    monkeypatch.setattr(update_soft, "separate", lambda critics: separate(critics)[[1, 0, 2]])
    _, *rest = counting.arguments("bench", "counting_sac", "run_dir=bench")
    assert rlinf_vla("bench", "update", *rest).code == 1


def test_imitation_is_not_measured(rlinf_vla: CommandLine, counting: Counting) -> None:
    _, *rest = counting.arguments("bench", "counting_sft", "run_dir=bench")
    assert (
        "bench update measures on-policy algorithms and sac, not sft"
        in rlinf_vla("bench", "update", *rest).complaint
    )
    _, *rest = counting.arguments("bench", "counting_ppo", "algorithm.granularity=word")
    assert (
        "algorithm.granularity=word is not known: use chunk, action or token"
        in rlinf_vla("bench", "update", *rest).complaint
    )
