"""Conformance suite of an algorithm plug-in: it trains a toy policy in a toy environment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file
from torch import Tensor

from rlinf_vla.algorithms.base import Algorithm
from rlinf_vla.algorithms.on_policy import Batch, OnPolicy
from rlinf_vla.cli import main as cli
from rlinf_vla.config.recipe import SUPERVISED
from rlinf_vla.core import plugins
from rlinf_vla.core.io import step_name
from rlinf_vla.core.protocols import Policy
from rlinf_vla.telemetry.metrics import read_metrics

from .config import assert_recipe_node
from .toy_env import CounterPlugin
from .toy_policy import LinearOptions, LinearPolicy

RECIPE = """# @package _global_
defaults:
  - _self_
  - override /env: counter
  - override /model: linear
  - override /algorithm: {name}
  - override /cluster: laptop
name: conformance
iterations: 3
model:
  checkpoint: {folder}/model
  lora:
    rank: 0
rollout:
  batch_size: 2
  pipeline_depth: 1
checkpoints:
  every: 1
  keep: 9
evaluation:
  before_and_after: false
cluster:
  update_threads: 1
"""
Train = Callable[..., Path]
"""Train in the run directory of this name, with further words; return the directory."""


@contextmanager
def as_before() -> Iterator[None]:
    """Restore afterwards what commands and Ray change: signal handlers, threads, and Hydra."""
    handlers = {
        signum: signal.getsignal(signum)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HYDRA_FULL_ERROR", "0")
            yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        torch.set_num_threads(threads)
        GlobalHydra.instance().clear()


class AlgorithmConformance:
    """Subclasses set ``algorithm``, and ``keys`` where its defaults are large."""

    algorithm: type[Algorithm]
    keys: ClassVar[tuple[str, ...]] = ()
    """Recipe keys for a short iteration, such as ``algorithm.horizon=12``: four environments whose
    episodes have at most 6 control steps, and policy calls of 2 actions."""
    on_ray: ClassVar[bool] = True
    """Compare with a run on Ray, which takes half a minute."""

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the directory of an uninterrupted run of three iterations."""
        with (
            pytest.MonkeyPatch.context() as patch,
            cls.installed(tmp_path_factory.mktemp("whole"), patch) as train,
        ):
            return train("whole")

    @pytest.fixture
    def train(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
        with self.installed(tmp_path, monkeypatch) as train:
            yield train

    @classmethod
    @contextmanager
    def installed(cls, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Train]:
        """Install the algorithm, the toy environment and the toy policy, and no other plug-ins."""
        name = cls.algorithm.Config().name  # type: ignore[attr-defined]
        patch.chdir(folder)
        patch.setattr(plugins, "algorithms", lambda: {name: cls.algorithm})
        patch.setattr(plugins, "envs", lambda: {"counter": CounterPlugin()})
        patch.setattr(plugins, "models", lambda: {"linear": LinearPolicy})
        announce(cls.algorithm, name, folder / "package")
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(folder / "package"), *sys.path]), prepend=os.pathsep
        )
        LinearPolicy(LinearOptions(chunk=2)).save(folder / "model")
        (folder / "recipe").mkdir()
        (folder / "recipe" / "conformance.yaml").write_text(RECIPE.format(name=name, folder=folder))

        def run(directory: str, *words: str, code: int = 0) -> Path:
            command = [
                "train",
                "--config-dir",
                str(folder),
                "recipe=conformance",
                *cls.keys,
                f"run_dir={directory}",
                *words,
            ]
            assert cli.run(command) == code, f"rlinf-vla {' '.join(command)}"
            return folder / directory

        with as_before():
            yield run

    def test_its_config_fits_into_a_recipe(self) -> None:
        config = self.algorithm.Config()
        assert config.family and getattr(config, "name", None), (
            "name a family: derive Config from that of OnPolicy, OffPolicy or Supervised"
        )
        assert_recipe_node(config)

    def test_each_iteration_changes_weights(self, whole: Path) -> None:
        snapshots = [weights(whole, step) for step in (1, 2, 3)]
        for earlier, later in pairwise(snapshots):
            assert any(not torch.equal(value, later[name]) for name, value in earlier.items())
        assert all(value.isfinite().all() for value in snapshots[-1].values())

    def test_what_it_logs_is_finite(self, whole: Path) -> None:
        """Only the variance that a critic explains may be unknown. Imitation logs some steps."""
        lines = read_metrics(whole)
        assert lines or self.algorithm.Config.family == SUPERVISED
        assert [
            (line["step"], name)
            for line in lines
            for name, value in line.items()
            if value is None and "explained" not in name
        ] == []

    def test_the_same_seed_trains_the_same_bits(self, train: Train, whole: Path) -> None:
        assert files(train("again"), 3) == files(whole, 3)

    def test_a_resumed_run_ends_in_the_same_bits(self, train: Train, whole: Path) -> None:
        """What an iteration changes beside the weights belongs into ``state`` and ``restore``."""
        parts = train("parts", "iterations=1")
        train("parts", "resume=auto")
        assert files(parts, 3) == files(whole, 3)

    def test_a_run_on_ray_ends_in_the_same_bits(self, train: Train, whole: Path) -> None:
        """What a loss reads of the algorithm, beside its config, belongs into ``state``, too."""
        if self.on_ray:
            pytest.importorskip("ray")
            assert files(train("ray", "cluster.runtime=ray"), 3) == files(whole, 3)

    def test_a_loss_is_a_sum_over_calls(
        self, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that it does not depend on how a minibatch is divided. Only if it is ``OnPolicy``."""
        if not issubclass(self.algorithm, OnPolicy):
            return
        original = self.algorithm.loss
        seen = list[int]()

        def loss(
            algorithm: Any, policy: Policy, batch: Batch, value_only: bool
        ) -> tuple[Tensor, dict[str, Tensor]]:
            whole = original(algorithm, policy, batch, value_only)
            with torch.no_grad():
                parts = [
                    original(algorithm, policy, batch[rows], value_only)
                    for rows in torch.arange(len(batch)).tensor_split(2)
                ]
            torch.testing.assert_close(
                sum(part for part, _ in parts), whole[0].detach(), rtol=1e-4, atol=1e-4
            )
            for name, value in whole[1].items():
                torch.testing.assert_close(
                    sum(statistics[name] for _, statistics in parts),
                    value,
                    rtol=1e-4,
                    atol=1e-4,
                    msg=name,
                )
            seen.append(len(batch))
            return whole

        monkeypatch.setattr(self.algorithm, "loss", loss)
        train("run", "iterations=1")
        assert max(seen) > 1

    def test_a_wrong_key_is_refused(self, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
        train("run", "algorithm.no_such_key=1", code=2)
        message = capsys.readouterr().err
        assert "algorithm.no_such_key is not a key" in message and message.count("\n") == 1


def announce(algorithm: type[Algorithm], name: str, folder: Path) -> None:
    """Write a package to ``folder`` by which Ray's workers find the plug-ins of the suite."""
    package = folder / "conformance-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance\nVersion: 0\n")
    points = {
        "algorithms": f"{name} = {algorithm.__module__}:{algorithm.__qualname__}",
        "envs": "counter = rlinf_vla.testing.toy_env:plugin",
        "models": "linear = rlinf_vla.testing.toy_policy:LinearPolicy",
    }
    (package / "entry_points.txt").write_text(
        "".join(f"[rlinf_vla.{group}]\n{point}\n" for group, point in points.items())
    )


def weights(directory: Path, step: int) -> dict[str, Tensor]:
    return load_file(directory / "checkpoints" / step_name(step) / "heads.safetensors")


def files(directory: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 of all files of a checkpoint by name. None contains a time or a path."""
    folder = directory / "checkpoints" / step_name(step)
    # Not their bytes: pytest explains unequal bytes by a diff, which takes minutes in CI.
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
