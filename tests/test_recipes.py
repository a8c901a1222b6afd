"""Runs one minimal iteration of every recipe of the package on its real simulator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vla.cli import compose
from rlinf_vla.cli import main as cli
from rlinf_vla.cli.list import recipe_names
from rlinf_vla.config.robot import ROBOT
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Feature
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.runtime import recipes
from rlinf_vla.telemetry.metrics import read_metrics
from tests.cli.conftest import handlers_of_a_module  # noqa: F401
from tests.skips import MODULES, python_with_metaworld, require

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.timeout(900),
]  # on a busy machine a simulator takes minutes to start

EARLIER = {
    "genesis_ppo": ("genesis_sft", "runs/genesis_sft/half"),
    "maniskill_sft_putonplate": ("maniskill_sft_putonplate_reach", "runs/putonplate/reach"),
}
"""Recipes that start from the result of another, which is in a run directory."""
HERE = [name for name in recipe_names() if not name.startswith("repro_")]
"""The others start from checkpoints of the Hub: tests/cli/test_reproductions.py."""
GIVEN = {"maniskill_sft_putonplate25": ["model.checkpoint=asset://openvla_oft_tiny_putonplate"]}
"""Keys of recipes that start from what another program writes."""

COMMON = (
    *(
        "cluster=laptop",
        "cluster.update_threads=1",
        "iterations=1",
        "checkpoints.every=1",
        "evaluation.before_and_after=false",
    ),
    *("env.num_envs=2", "env.episode_limit=4", "rollout.pipeline_depth=1", "rollout.batch_size=2"),
)
PUT_ON_PLATE = (
    "maniskill_grpo_putonplate",
    "maniskill_ppo_putonplate",
    "maniskill_sft_putonplate",
    "maniskill_sft_putonplate_reach",
)
NIGHTLY = (
    *PUT_ON_PLATE,
    "maniskill_grpo_putonplate25",
    "maniskill_dsrl",
    "reward_classifier",
    "libero_sft",
    "libero_ppo_pi0",
)
"""Recipes that share a simulator with no other one, or algorithm and simulator with others."""
PROGRESS = "env.reward=progress"
"""The same in all recipes with rewards, so that recipes of a task share a simulator."""
SMALL = {
    "ppo": ("algorithm.horizon=4", "algorithm.epochs=1", "algorithm.minibatch_size=4"),
    "grpo": (
        "algorithm.episodes=2",
        "algorithm.group_size=2",
        "algorithm.epochs=1",
        "algorithm.minibatch_size=4",
    ),
    "sac": ("algorithm.episodes=2", "algorithm.batch_size=4", "algorithm.updates_per_step=0.25"),
    "cal_ql": (
        "algorithm.episodes=2",
        "algorithm.batch_size=4",
        "algorithm.offline_iterations=1",
        "algorithm.offline_updates=2",
    ),
    "dagger": ("algorithm.episodes=2", "algorithm.batch_size=4", "algorithm.updates=2"),
    "sft": ("algorithm.demonstrations.episodes=2", "algorithm.batch_size=4"),
    "value": ("algorithm.demonstrations.dataset=recording", "algorithm.batch_size=4"),
    "recap": ("algorithm.demonstrations.dataset=recording", "algorithm.batch_size=4"),
    "classifier": (
        "algorithm.demonstrations.episodes=10",
        "algorithm.batch_size=4",
        "env.episode_limit=30",
    ),
}

Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def kept_simulators() -> Iterator[None]:
    """Recipes share simulators, which take seconds to start: a simulator survives when a command closes it."""
    with pytest.MonkeyPatch.context() as patch:
        started: dict[str, list[VectorEnv]] = {}
        endings: list[Callable[[], None]] = []
        for plugin in plugins.envs().values():

            def create(
                config: Any, groups: int, original: Callable[..., list[VectorEnv]] = plugin.create
            ) -> list[VectorEnv]:
                wanted = repr((config, groups))
                if wanted not in started:
                    started[wanted] = original(config, groups)
                    for env in started[wanted]:
                        endings.append(env.close)
                        patch.setattr(env, "close", lambda: None)
                return started[wanted]

            patch.setattr(plugin, "create", create)
        yield
        for end in endings:
            end()


@pytest.fixture(scope="module")
def run(kept_simulators: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a recipe once, after the recipe that it starts from, in a shared folder; returns its run directory."""
    folder = tmp_path_factory.mktemp("recipes")
    done = dict[str, Path]()
    threads = torch.get_num_threads()
    directories = dict(EARLIER.values())

    def once(name: str) -> Path:
        if name not in done:
            if name in EARLIER:
                once(EARLIER[name][0])
            found = recipes.read(compose.load("train", [f"recipe={name}", "cluster=laptop"]))
            algorithm = found.algorithm.name
            few = (
                ["algorithm.demonstrations=1"]
                if algorithm in ("sac", "cal_ql") and found.algorithm.demonstrations
                else []
            )
            rewarded = [PROGRESS] if hasattr(found.env, "reward") else []
            few += ["env.processes=1"] if hasattr(found.env, "processes") else []
            few += (
                [f"env.python={python_with_metaworld() or 'null'}"]
                if found.env.name == "metaworld"
                else []
            )
            few += GIVEN.get(name, [])
            run_dir = directories.get(name, f"runs/{name}/tiny")
            assert (
                cli.run(
                    [
                        "train",
                        f"recipe={name}",
                        f"run_dir={run_dir}",
                        *COMMON,
                        *SMALL[algorithm],
                        *few,
                        *rewarded,
                    ]
                )
                == 0
            )
            done[name] = folder / run_dir
        return done[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        record(folder / "recording")
        yield once
    torch.set_num_threads(threads)


def record(directory: Path) -> None:
    """A labelled recording of PushCube's sizes, of which some episodes fail."""
    flag = Feature("bool", (1,))
    features = {
        form.STATE: Feature("float32", (8,)),
        form.ACTION: Feature("float32", (4,)),
        form.SUCCESS: flag,
        "advantage_positive": flag,
        f"{form.IMAGES}base": Feature.camera((64, 64), video=False),
    }
    with LeRobotWriter(directory, 20, features) as writer:
        for number in range(12):
            frames = {
                key: np.zeros((2, *feature.shape), np.uint8 if feature.is_camera else feature.dtype)
                for key, feature in features.items()
            }
            frames[form.SUCCESS][-1] = number % 2
            writer.add_episode(frames, "push the blue cube to the red and white target")


def require_simulator(name: str) -> None:
    """Skips if the recipe's simulator is not installed; if anything else is missing, the test fails."""
    env = compose.load("train", [f"recipe={name}", "cluster=laptop"]).env.name
    if env == ROBOT:
        pytest.skip("a robot's recipe")
    if env in MODULES:  # text needs no simulator
        require(env)
    if env == "metaworld":
        python_with_metaworld()
    lacking = [
        check
        for check in plugins.envs()[env].diagnose()
        if not check.ok and not check.detail.startswith("optional")
    ]
    assert not lacking, lacking


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in HERE],
)
def test_a_recipe_runs_an_iteration(
    run: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    require_simulator(name)
    if (
        recipes.read(compose.load("train", [f"recipe={name}", "cluster=laptop"])).algorithm.name
        == "none"
    ):
        pytest.skip("an evaluation recipe")
    directory = run(name)
    assert (directory / "checkpoints" / "step_000001" / "COMPLETE").exists() and (
        directory / "report.html"
    ).exists()
    algorithm = recipes.read(
        compose.load("train", [f"recipe={name}", "cluster=laptop"])
    ).algorithm.name
    made = {"sft": "policy", "recap": "policy", "classifier": "classifier", "value": "value"}
    if algorithm in made:
        assert (directory / made[algorithm] / "manifest.json").exists()
    else:
        metrics = read_metrics(directory)[0]
        assert metrics.get("rollout/steps", 0) > 0 or metrics["cal_ql/offline"]


@pytest.mark.slow
def test_a_sweep_of_real_simulators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its result is verified, too."""
    require_simulator("maniskill_eval")
    monkeypatch.chdir(tmp_path)
    small = (
        "env.tasks=[PushCube]",
        "env.num_envs=2",
        "env.processes=1",
        "rollout.pipeline_depth=1",
        "rollout.batch_size=2",
    )
    assert (
        cli.run(
            [
                "eval",
                "recipe=maniskill_eval",
                "run_dir=out",
                "episodes=2",
                "evaluation.filmed=0",
                *small,
            ]
        )
        == 0
    )
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [document["policies"][name]["n_success"] for name in ("expert", "random")] == [2, 0]
    assert document["suites"][0]["stack"].keys() >= {"sapien", "physics", "renderer"}
    capsys.readouterr()
    assert cli.run(["verify", str(tmp_path / "out" / "result.json"), "--episodes", "2"]) == 0
    assert "2 of 2 episodes are bit-identical" in capsys.readouterr().out
