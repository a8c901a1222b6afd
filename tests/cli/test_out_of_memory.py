"""A full GPU ends a command in one line, with the keys to set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.ppo import PPOConfig
from rlinf_vla.algorithms.sac import SACConfig
from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.recipe import LoraOptions, ModelConfig, Recipe, RolloutConfig
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.runtime.out_of_memory import explained, remedies
from rlinf_vla.testing.toy_env import CounterConfig
from rlinf_vla.testing.toy_policy import LinearOptions
from rlinf_vla.training.trainer import Trainer
from tests.cli.conftest import CommandLine, Counting

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
RECIPE = Recipe(
    name="toy",
    iterations=1,
    seed=7,
    env=CounterConfig(),
    model=ModelConfig("linear", None, LinearOptions(), LoraOptions(rank=0)),
    algorithm=PPOConfig(),
    rollout=RolloutConfig(batch_size=1),
    cluster=ClusterConfig(
        name="1gpu", micro_batch_size=1, gradient_checkpointing=True, cuda_graphs=False
    ),
)
"""Nothing of it is left to save, but that all weights are trained."""


def full(*arguments: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError(FULL)


@pytest.mark.parametrize(
    ("verb", "owner", "function", "keys"),
    [
        ("train", Trainer, "step", "cluster.micro_batch_size="),
        ("train", Actor, "act", "cluster.micro_batch_size="),
        ("eval", Actor, "act", "rollout.batch_size="),
    ],
)
def test_a_full_gpu_is_one_line(
    rlinf_vla: CommandLine,
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    owner: type,
    function: str,
    keys: str,
) -> None:
    monkeypatch.setattr(owner, function, full)
    words = ("run_dir=run", "evaluation.before_and_after=false", "rollout.batch_size=2")
    done = rlinf_vla(*counting.arguments(verb, "counting_ppo", *words))
    assert done.code == 1
    (said,) = [line for line in done.err.splitlines() if line.startswith("rlinf-vla:")]
    assert f"a GPU has too little memory ({FULL}): try in this order {keys}" in said
    assert ("resume=auto" in said) == (verb == "train")
    assert "Traceback" not in done.err


def test_a_full_main_memory_is_another_fault() -> None:
    lost = RuntimeError("rollout workers were lost 4 times: rollout 0 ran out of memory")
    with pytest.raises(RuntimeError) as raised, explained(RECIPE, trains=True):
        raise lost
    assert raised.value is lost


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({}, ["model.lora.rank=32"]),
        ({"micro_batch_size": 16}, ["cluster.micro_batch_size=8", "model.lora.rank=32"]),
        (
            {"gradient_checkpointing": False, "cuda_graphs": True},
            [
                "cluster.gradient_checkpointing=true",
                "cluster.cuda_graphs=false",
                "model.lora.rank=32",
            ],
        ),
        (
            {"runtime": "ray", "trainer_ranks": 2},
            ["cluster.offload=true", "cluster.trainer_sharding=full", "model.lora.rank=32"],
        ),
        (
            {"runtime": "ray", "offload": True, "trainer_ranks": 2, "trainer_sharding": "full"},
            ["model.lora.rank=32"],
        ),
    ],
)
def test_the_keys_are_those_that_are_not_set_yet(changed: dict[str, Any], keys: list[str]) -> None:
    recipe = replace(RECIPE, cluster=replace(RECIPE.cluster, **changed))
    assert remedies(recipe, trains=True) == keys
    acting = [key for key in keys if key == "cluster.cuda_graphs=false"]
    assert remedies(recipe, trains=False) == acting


def test_an_off_policy_update_has_no_micro_batches() -> None:
    cluster = replace(RECIPE.cluster, micro_batch_size=16, runtime="ray")
    adapters = replace(RECIPE.model, lora=LoraOptions(rank=8))
    recipe = replace(RECIPE, cluster=cluster, model=adapters, algorithm=SACConfig(batch_size=64))
    assert remedies(recipe, trains=True) == ["algorithm.batch_size=32"]
