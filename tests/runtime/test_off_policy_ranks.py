"""Off-policy algorithms learn the same on several trainer ranks, each with a shard of the replay buffers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.cal_ql import CalQL, CalQLConfig
from rlinf_vla.algorithms.dagger import DAgger, DAggerConfig
from rlinf_vla.algorithms.off_policy import ReplayConfig, ReplayLearner
from rlinf_vla.algorithms.sac import SAC, SACConfig
from rlinf_vla.config.recipe import EXPERT
from rlinf_vla.core.types import Inputs
from rlinf_vla.runtime.off_policy import learn_from_replay, open_replays
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.trainer import Trainer
from tests.algorithms.td3 import TD3, TD3Config
from tests.training.processes import on_ranks

COMMON: dict[str, Any] = {
    "batch_size": 7,
    "hidden": 8,
    "shift": 2,
    "replay_capacity": 30,
    "max_grad_norm": 0.5,
}
SOFT = SACConfig(critics=3, backup_entropy=True, **COMMON)
SHOWN = {"demonstrations": 3, "sft_coef": 0.3, "demonstration_share": 0.5}
TAUGHT = DAggerConfig(batch_size=7, replay_capacity=30, teacher="somewhere")
RECIPES: dict[str, tuple[type[ReplayLearner], ReplayConfig]] = {
    "sac": (SAC, SOFT),
    "rlpd": (SAC, replace(SOFT, **SHOWN)),
    "dsrl": (SAC, replace(SOFT, frozen_backbone=True, noise_bound=1.5)),
    "cal_ql": (
        CalQL,
        CalQLConfig(
            critics=3,
            demonstrations=5,
            offline_iterations=2,
            conservative_samples=2,
            **COMMON,
        ),
    ),
    "td3": (TD3, TD3Config(**COMMON)),
    "dagger": (DAgger, DAggerConfig(batch_size=7, replay_capacity=30)),
    "imitated teacher": (DAgger, replace(TAUGHT, loss="imitation")),
    "forward kl": (DAgger, replace(TAUGHT, loss="forward_kl")),
    "reverse kl": (DAgger, replace(TAUGHT, loss="reverse_kl")),
}


class Seeing(LinearPolicy):
    """With an encoder that learns, in float64, so that rounding hides no error."""

    noise_dim = 4

    def __init__(self, seed: int = 0) -> None:
        super().__init__(LinearOptions(chunk=1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.backbone["seen"] = nn.Linear(8 * 8 * 3, 6)
            self.backbone["logits"] = nn.Linear(6, 4 * self.options.bins)
            self.value_head = nn.Linear(6, 1)

    def encode(self, inputs: Inputs) -> Tensor:
        seen: Tensor = self.backbone["seen"](
            super().encode({"image": inputs["image.base"]}).to(self.value_head.weight.dtype)
        )
        return seen.tanh()

    def prepare(self, obs: Any) -> Inputs:
        return {"image.base": super().prepare(obs)["image"]}


def episode(number: int, features: bool = False) -> dict[str, Tensor]:
    """Of one to six transitions; every third one is truncated. With ``features`` in place of images."""
    generator = torch.Generator().manual_seed(number)
    length = 1 + number * 5 % 6
    cut = number % 3 == 0
    rows = length + cut
    acted = torch.ones(rows, dtype=torch.bool)
    discount = torch.full((rows,), 0.9)
    if cut:
        acted[-1] = False
    else:
        discount[-1] = 0.0
    image = torch.randint(0, 256, (rows, 8, 8, 3), generator=generator, dtype=torch.uint8)
    seen = (
        {"features": torch.randn(rows, 6, generator=generator).double()}
        if features
        else {"image.base": image}
    )
    action = torch.rand(rows, *((4,) if features else (1, 4)), generator=generator) * 2 - 1
    return seen | {
        "latent.choice": torch.randint(5, (rows, 1, 4), generator=generator),
        "action": action,
        "reward": torch.randn(rows, generator=generator),
        "cost": torch.zeros(rows),
        "discount": discount,
        "acted": acted,
    }


def make(name: str) -> tuple[Trainer, ReplayLearner]:
    kind, config = RECIPES[name]
    algorithm = kind(config)
    policy = algorithm.wrap(Seeing(), 0).double()
    trainer = Trainer(policy, algorithm, 64)
    if getattr(config, "teacher", EXPERT) != EXPERT:
        trainer.teacher = Seeing(1).double().requires_grad_(False)
    return trainer, algorithm


def learnt(name: str, folder: Path, iterations: int = 3) -> dict[str, Any]:
    """Metrics of each iteration, and weights and state after the last one."""
    trainer, algorithm = make(name)
    config = algorithm.config
    stores = open_replays(folder, config, {})
    for number in range(getattr(config, "demonstrations", 0)):
        stores[1].append(algorithm.stored(episode(100 + number)))
    metrics = []
    frozen = getattr(config, "frozen_backbone", False)
    for iteration in range(iterations):
        collected = 0 if algorithm.demonstrated(iteration) == 1 else 4
        for number in range(collected):
            stores[0].append(algorithm.stored(episode(4 * iteration + number, frozen)))
        metrics.append(learn_from_replay(trainer, algorithm, stores, 5, 0, iteration))
    return {"metrics": metrics, "weights": trainer.weights(), "state": trainer.state()}


def assert_close(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name, value in expected.items():
            assert_close(found[name], value, f"{path}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for number, (first, second) in enumerate(zip(found, expected, strict=True)):
            assert_close(first, second, f"{path}/{number}")
    else:
        torch.testing.assert_close(
            torch.as_tensor(found),
            torch.as_tensor(expected),
            rtol=1e-9,
            atol=1e-10,
            msg=lambda said: f"{path}: {said}",
        )


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(RECIPES))
def test_ranks_learn_what_one_process_learns(name: str, count: int, tmp_path: Path) -> None:
    alone = learnt(name, tmp_path / "one")
    for found in on_ranks(lambda rank: learnt(name, tmp_path / "many"), tmp_path, count):
        assert_close(found, alone)
