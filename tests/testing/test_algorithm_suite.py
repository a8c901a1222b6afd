"""The suite of algorithm plug-ins: the engine's algorithms pass, and mistakes in an algorithm fail."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.cal_ql import CalQL
from rlinf_vla.algorithms.dagger import DAgger
from rlinf_vla.algorithms.grpo import GRPO
from rlinf_vla.algorithms.ppo import PPO
from rlinf_vla.algorithms.sac import SAC
from rlinf_vla.algorithms.sft import SFT
from rlinf_vla.testing.algorithm import AlgorithmConformance, Train
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.algorithms.a2c import A2C
from tests.algorithms.td3 import TD3
from tests.data.test_from_dataset import played, write

REPLAY = (
    "algorithm.episodes=4",
    "algorithm.updates_per_step=0.2",
    "algorithm.batch_size=8",
    "algorithm.hidden=16",
)
ON_POLICY = ("algorithm.minibatch_size=10", "algorithm.learning_rate=0.05")


@pytest.fixture(autouse=True, scope="module")
def no_report() -> Iterator[None]:
    """Drawing a run's report would take a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlinf_vla.telemetry.report.write_report", lambda directory: directory)
        yield


class Suite(AlgorithmConformance):
    on_ray = False  # test_algorithm_on_ray.py, tests/cli/test_other_algorithms.py

    @classmethod
    def prepare(cls, folder: Path) -> None:
        """Write what the keys name, into the working directory of the runs."""

    @classmethod
    @contextmanager
    def installed(cls, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Train]:
        with super().installed(folder, patch) as train:
            cls.prepare(folder)
            yield train


class TestPPO(Suite):
    algorithm = PPO
    keys = ("algorithm.horizon=12", *ON_POLICY)


class TestGRPO(Suite):
    algorithm = GRPO
    keys = ("algorithm.episodes=8", "algorithm.group_size=4", *ON_POLICY)


class TestSAC(Suite):
    algorithm = SAC
    keys = ("algorithm.critics=3", *REPLAY)


class TestCalQL(Suite):
    algorithm = CalQL
    keys = (
        *TestSAC.keys,
        "algorithm.dataset=dataset",
        "algorithm.offline_iterations=1",
        "algorithm.offline_updates=2",
    )

    @classmethod
    def prepare(cls, folder: Path) -> None:
        write(folder / "dataset", played())


class TestDAgger(Suite):
    algorithm = DAgger
    keys = (
        "algorithm.episodes=4",
        "algorithm.updates=2",
        "algorithm.batch_size=8",
        "algorithm.beta=0.5",
    )


class TestDistillation(Suite):
    algorithm = DAgger
    keys = (
        *TestDAgger.keys[:-1],
        "algorithm.teacher=teacher",
        "algorithm.loss=reverse_kl",
    )

    @classmethod
    def prepare(cls, folder: Path) -> None:
        LinearPolicy(LinearOptions(chunk=2, seed=1)).save(folder / "teacher")


class TestSFT(Suite):
    algorithm = SFT
    keys = (
        "algorithm.batch_size=8",
        "algorithm.warmup_steps=1",
        "algorithm.decay_steps=3",
        "algorithm.demonstrations.episodes=6",
    )


class TestA2C(Suite):
    algorithm = A2C
    keys = ON_POLICY


class TestTD3(Suite):
    algorithm = TD3
    keys = REPLAY


class Lazy(A2C):
    def iteration(self, flow: Any) -> None:
        flow.publish()


class Mean(A2C):
    def loss(self, policy: Any, batch: Any, value_only: bool) -> Any:
        total, metrics = super().loss(policy, batch, value_only)
        return total / len(batch), metrics


class Forgetful(A2C):
    """Its entropy bonus decays, which no checkpoint knows."""

    def iteration(self, flow: Any) -> None:
        self.config.entropy_coef = (self.config.entropy_coef or 1.0) / 2
        super().iteration(flow)


class Random(A2C):
    def loss(self, policy: Any, batch: Any, value_only: bool) -> Any:
        total, metrics = super().loss(policy, batch, value_only)
        return total * float(1 + torch.rand(1)), metrics


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Lazy, "test_each_iteration_changes_weights"),
        (Mean, "test_a_loss_is_a_sum_over_calls"),
        (Forgetful, "test_a_resumed_run_ends_in_the_same_bits"),
        (Random, "test_the_same_seed_trains_the_same_bits"),
    ],
)
def test_a_mistake_fails(
    broken: Any, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Suite):
        algorithm = broken
        keys = ON_POLICY

    test = getattr(Broken(), check)
    with Broken.installed(tmp_path, monkeypatch) as train:
        given = {"monkeypatch": monkeypatch, "train": train, "whole": train("whole")}
        with pytest.raises(AssertionError):
            test(**{name: given[name] for name in inspect.signature(test).parameters})


def test_metrics_that_are_not_finite_fail(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "actor/pg_loss": null}\n')
    with pytest.raises(AssertionError):
        TestA2C().test_what_it_logs_is_finite(tmp_path)
