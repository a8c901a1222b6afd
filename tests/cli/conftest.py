from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.cli import main as cli
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Learner
from rlinf_vla.rollout import actor
from rlinf_vla.runtime import builders
from rlinf_vla.testing.algorithm import as_before
from rlinf_vla.testing.simulated_gpu import GPU, paused, recorder, simulated_gpu
from rlinf_vla.testing.toy_env import CounterPlugin
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.counting_plugins import announce
from tests.hub_server import Hub, serving


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one-line error message of a user's mistake."""
        assert self.code == 2, self.out + self.err
        assert self.err.startswith("rlinf-vla: ") and self.err.count("\n") == 1, self.err
        return self.err.removeprefix("rlinf-vla: ").rstrip("\n")


CommandLine = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with as_before():
        yield


@pytest.fixture(autouse=True, scope="module")
def handlers_of_a_module() -> Iterator[None]:
    """For commands that a module runs once for all its tests."""
    with as_before():
        yield


@pytest.fixture(autouse=True, scope="module")
def undrawn() -> Iterator[None]:
    """Reports have no charts: these take most of the time of a tiny run, and tests/telemetry draws them."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("curve", "success_curve", "timeline", "histogram"):
            patch.setattr(f"rlinf_vla.telemetry.charts.{kind}", lambda *_: "<svg></svg>")
        yield


@pytest.fixture
def rlinf_vla(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    """Runs a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code = cli.run(arguments)
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 1
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The policies and reward models of recipes are on the simulated GPU."""

    def on_the_gpu(build: Callable[..., Learner], *arguments: Any, **options: Any) -> Learner:
        with paused():
            learner = build(*arguments, **options)
        return learner.to(GPU)

    for name in ("build_policy", "build_reward_model"):
        monkeypatch.setattr(builders, name, partial(on_the_gpu, getattr(builders, name)))
    monkeypatch.setitem(actor.RECORDERS, GPU.type, recorder)
    with simulated_gpu():
        yield


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Serves stand-ins of all published repositories."""
    from tests.stand_ins import STAND_INS, files  # makes networks

    with serving(monkeypatch, str(tmp_path / "client")) as server:
        for name in STAND_INS:
            server.holds("models", name, files(name))
        yield server


COUNTING = """# @package _global_
# Counting up, by {algorithm}.
defaults:
  - _self_
  - override /env: counter
  - override /model: linear
  - override /algorithm: {algorithm}
name: {name}
iterations: {iterations}
episodes: 5
cluster:
  update_threads: 1
env:
  num_envs: 4
model:
  checkpoint: {checkpoint}
  lora:
    rank: {rank}
rollout:
  batch_size: 1
checkpoints:
  every: 1
algorithm:
"""
PPO = (
    COUNTING
    + "  horizon: 12\n  minibatch_size: 10\n  epochs: 2\n  learning_rate: 0.05\n  value_learning_rate: 0.01\n  target_kl: null\n"
)
GRPO = (
    COUNTING
    + "  episodes: 8\n  group_size: 4\n  minibatch_size: 10\n  learning_rate: 0.05\n  target_kl: null\n"
)
SAC = (
    COUNTING
    + "  episodes: 4\n  updates_per_step: 0.2\n  batch_size: 8\n  critics: 3\n  hidden: 16\n"
)
CAL_QL = SAC + "  offline_iterations: 2\n  offline_updates: 3\n  conservative_samples: 2\n"
CLASSIFIER = """# @package _global_
# Sees when counting is done.
defaults:
  - _self_
  - override /env: counter
  - override /reward: classifier
  - override /model: none
  - override /algorithm: classifier
name: counting_classifier
iterations: 60
env:
  num_envs: 4
algorithm:
  batch_size: 16
  shift: 0
  warmup_steps: 1
  demonstrations:
    episodes: 24
    noise: [0.0, 1.0]
checkpoints:
  every: 20
"""
EVALUATION = """# @package _global_
# Counting, by those who need not learn it.
defaults:
  - _self_
  - override /env: counter
  - override /model: none
  - override /algorithm: none
name: counting_eval
iterations: 0
sweep:
  policies: ${model_or:expert,random}
"""
COUNTED = """# @package _global_
defaults:
  - _self_
  - override /env: counter
  - override /model: openvla
  - override /algorithm: ppo
name: counted
iterations: 1
"""
DAGGER = COUNTING + "  episodes: 4\n  updates: 3\n  batch_size: 8\n  beta: 0.5\n"
SFT = (
    COUNTING
    + "  batch_size: 8\n  warmup_steps: 1\n  learning_rate: 0.05\n  demonstrations:\n    episodes: 6\n"
)


@dataclass
class Counting:
    """Recipes for counter world, in a user's folder; ``plugin.created`` are the environments of all runs."""

    folder: Path
    plugin: CounterPlugin

    def arguments(self, verb: str, recipe: str, *overrides: str) -> list[str]:
        return [verb, "--config-dir", str(self.folder), f"recipe={recipe}", *overrides]


def write_recipes(folder: Path) -> None:
    """Recipes ``counting_ALGORITHM`` and the checkpoint of their policy."""
    LinearPolicy(LinearOptions(chunk=2)).save(folder / "model")
    (folder / "recipe").mkdir()
    for algorithm, text, iterations, rank in (
        ("ppo", PPO, 2, 2),
        ("grpo", GRPO, 2, 2),
        ("sac", SAC, 2, 0),
        ("cal_ql", CAL_QL, 4, 0),
        ("dagger", DAGGER, 2, 0),
        ("sft", SFT, 6, 0),
    ):
        name = f"counting_{algorithm}"
        filled = text.format(
            name=name,
            algorithm=algorithm,
            iterations=iterations,
            rank=rank,
            checkpoint=folder / "model",
        )
        (folder / "recipe" / f"{name}.yaml").write_text(filled)
    (folder / "recipe" / "counting_classifier.yaml").write_text(CLASSIFIER)
    (folder / "recipe" / "counting_eval.yaml").write_text(EVALUATION)


@pytest.fixture
def counting(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Counter world and the linear policy as installed plug-ins, and recipes ``counting_ALGORITHM``."""
    plugin = CounterPlugin()
    monkeypatch.setattr(plugins, "envs", lambda: {"counter": plugin})
    monkeypatch.setattr(plugins, "models", lambda: {"linear": LinearPolicy})
    folder = tmp_path_factory.mktemp("user")
    write_recipes(folder)
    return Counting(folder, plugin)


@pytest.fixture
def train(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Trains in a run directory of that name; drawing its report would take most of the time."""

    def run(
        name: str,
        *overrides: str,
        code: int = 0,
        report: bool = False,
        recipe: str = "counting_ppo",
    ) -> Path:
        if not report:
            monkeypatch.setattr(
                "rlinf_vla.telemetry.report.write_report", lambda directory: directory
            )
        found = rlinf_vla(*counting.arguments("train", recipe, f"run_dir={name}", *overrides))
        assert found.code == code, found.out + found.err
        return tmp_path / name

    return run


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Counter world as an installed plug-in beside the others; returns a folder for recipes.

    ``recipe=counted`` evaluates or trains an OpenVLA there, and needs ``model.checkpoint``.
    """
    announce(tmp_path / "package")
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "counted.yaml").write_text(COUNTED)
    return tmp_path
