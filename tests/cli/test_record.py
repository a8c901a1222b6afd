"""Recording the expert as a dataset and training on it, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.telemetry.metrics import read_metrics
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import CommandLine, Counting

LEROBOT = Path(__file__).parents[1] / "data/fixtures"
QUICK = "evaluation.before_and_after=false"


@pytest.mark.parametrize("recipe", ["counting_sft", "counting_ppo"])
def test_a_dataset_of_the_expert(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, recipe: str) -> None:
    shown = [
        "algorithm.demonstrations.episodes=8",
        "algorithm.demonstrations.noise=[0.0,0.8]",
        "algorithm.demonstrations.random_actions=0.5",
    ]
    found = rlinf_vla(*counting.arguments("record", recipe, "output=some", *shown))
    assert found.code == 0, found.err
    assert rlinf_vla(*counting.arguments("record", recipe, "output=all", "record.failures=true", "record.video=false", *shown)).code == 0
    some, everything = LeRobotReader(tmp_path / "some"), LeRobotReader(tmp_path / "all")
    assert 0 < len(some) < len(everything) == 8 and f"8 episodes played, {len(some)} with success" in found.out
    assert some.features["observation.images.base"].dtype == "video" and everything.features["observation.images.base"].dtype == "image"
    assert some.fps == 10 and all(some.episode(number, ["next.success"]).columns["next.success"][-1] for number in range(len(some)))
    assert all(env.closed for env in counting.plugin.created)


def test_imitation_of_a_recording_needs_no_simulator(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> None:
    keep = ["record.failures=true", "record.video=false"]
    assert rlinf_vla(*counting.arguments("record", "counting_sft", "output=data", *keep)).code == 0
    opened = len(counting.plugin.created)
    dataset = ["algorithm.demonstrations.dataset=data", "algorithm.demonstrations.action_key=expert_action"]
    of_dataset = rlinf_vla(*counting.arguments("train", "counting_sft", "run_dir=recorded", QUICK, *dataset))
    assert of_dataset.code == 0, of_dataset.err
    assert len(counting.plugin.created) == opened
    assert rlinf_vla(*counting.arguments("train", "counting_sft", "run_dir=played", QUICK)).code == 0
    learnt = [(tmp_path / name / "policy/model.safetensors").read_bytes() for name in ("recorded", "played")]
    assert learnt[0] == learnt[1], "the same states and the same labels"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_imitation_of_what_lerobot_recorded(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, kind: str) -> None:
    """``tests/data/lerobot_peer.py`` recorded the datasets with lerobot itself."""
    dataset = [f"algorithm.demonstrations.dataset={LEROBOT / kind}", "algorithm.demonstrations.cameras=[base:front]"]
    LinearPolicy(LinearOptions(chunk=2, action_dim=2)).save(tmp_path / "model")
    model = ["model.checkpoint=model", "model.options.action_dim=2"]
    found = rlinf_vla(*counting.arguments("train", "counting_sft", f"run_dir={kind}", QUICK, *dataset, *model))
    assert found.code == 0, found.err
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", f"{kind}/policy"))
    assert before.keys() == after.keys() and not torch.equal(before["logits.weight"], after["logits.weight"])


def test_co_training_on_a_recording(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> None:
    assert rlinf_vla(*counting.arguments("record", "counting_sft", "output=data", "record.failures=true")).code == 0
    cotraining = ["algorithm.sft_coef=1.0", "algorithm.demonstrations.dataset=data", "run_dir=ppo"]
    found = rlinf_vla(*counting.arguments("train", "counting_ppo", QUICK, *cotraining))
    assert found.code == 0, found.err
    assert any("sft/loss" in line for line in read_metrics(tmp_path / "ppo"))
    found = rlinf_vla(*counting.arguments("train", "counting_sac", QUICK, "algorithm.dataset=data", "run_dir=sac"))
    assert found.code == 0, found.err
    assert any("demonstrations/success" in line for line in read_metrics(tmp_path / "sac"))


def test_mistakes_are_one_line(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> None:
    def complaint(recipe: str, *overrides: str) -> str:
        return rlinf_vla(*counting.arguments("record", recipe, *overrides)).complaint

    assert complaint("counting_sft").startswith("record needs algorithm.demonstrations and an output directory")
    assert complaint("counting_sac", "output=data").startswith("record needs algorithm.demonstrations")
    assert "leave algorithm.demonstrations.dataset out" in complaint("counting_sft", "output=data", "algorithm.demonstrations.dataset=x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "full is not empty" in complaint("counting_sft", "output=full")
    hopeless = ["env.episode_limit=1", "algorithm.demonstrations.episodes=3", "algorithm.demonstrations.noise=[9.0]"]
    assert "the expert succeeded in none of 3 episodes" in complaint("counting_sft", "output=data", *hopeless)
    assert not (tmp_path / "data").exists()
    imitation = rlinf_vla(*counting.arguments("train", "counting_sft", "algorithm.demonstrations.dataset=nowhere", QUICK))
    assert imitation.complaint == "nowhere is not a directory: name one that holds a LeRobotDataset"
