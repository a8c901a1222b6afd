"""Values, labels and RECAP by the command line, in counter world."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.algorithms.value import ValuePolicy
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.runtime.value_models import load_value_model
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import SFT, CommandLine, Counting
from tests.cli.runs import assert_same_files

Train = Callable[..., Path]
UNPLAYED = "evaluation.before_and_after=false"
SHORT = (
    "iterations=4",
    "algorithm.decay_steps=4",
    "algorithm.batch_size=8",
    "checkpoints.every=1",
    "checkpoints.keep=9",
)
READS = "model.checkpoint={}/reader"


@pytest.fixture
def mixed(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> Counting:
    """Recipes ``counting_value`` and ``counting_recap``, and a dataset ``mixed`` of which some fail."""
    LinearPolicy(LinearOptions(chunk=2, reads=True)).save(counting.folder / "reader")
    for name in ("value", "recap"):
        text = SFT.format(
            name=f"counting_{name}",
            algorithm=name,
            iterations=4,
            rank=0,
            checkpoint=counting.folder / ("model" if name == "value" else "reader"),
        ).replace("    episodes: 6\n", "    dataset: mixed\n")
        (counting.folder / "recipe" / f"counting_{name}.yaml").write_text(text)
    shown = ["algorithm.demonstrations.episodes=12", "algorithm.demonstrations.noise=[0.0,1.5]"]
    keep = ["record.failures=true", "record.video=false", "output=mixed"]
    found = rlinf_vla(*counting.arguments("record", "counting_sft", *shown, *keep))
    assert found.code == 0, found.err
    assert not found.out.startswith("12 episodes played, 12")
    return counting


@pytest.mark.slow
def test_from_a_recording_to_a_policy_that_is_told(
    rlinf_vla: CommandLine, mixed: Counting, train: Train, tmp_path: Path
) -> None:
    opened = len(mixed.plugin.created)
    run = train("value", *SHORT, recipe="counting_value")
    assert len(mixed.plugin.created) == opened, "values need no simulator"
    document = json.loads((run / "evaluation" / "after.json").read_text())
    assert document["episodes"] == 1 and -1 <= document["spearman"] <= 1
    model, training = load_value_model(str(run / "value"), "value")
    assert isinstance(model, ValuePolicy) and set(training.longest) == {
        "push the cube",
        "stack the red cube on the green cube",
    }

    found = rlinf_vla("label", "mixed", "value=value/value", "output=labelled", "positive=0.4")
    assert found.code == 0, found.err
    assert found.out.splitlines()[-2].startswith("12 episodes, ")
    copy = LeRobotReader(tmp_path / "labelled")
    episode = copy.episode(0, ["value", "advantage", "advantage_positive", "return", "action"])
    assert np.isfinite(episode.columns["value"]).all()

    labelled = "algorithm.demonstrations.dataset=labelled"
    told = train("told", *SHORT, labelled, "episodes=6", recipe="counting_recap")
    evaluation = json.loads((told / "evaluation" / "after.json").read_text())
    again = rlinf_vla("eval", "run=told", "run_dir=again", "episodes=6", "evaluation.filmed=0")
    assert again.code == 0, again.err
    after = json.loads((tmp_path / "again" / "evaluation" / "step_000004.json").read_text())
    assert after["greedy"]["episodes"] == evaluation["greedy"]["episodes"]
    policy = LinearPolicy.load(told / "policy", LinearOptions())
    assert policy.options.reads and not (told / "policy" / "heads.safetensors").exists()

    keep = ("record.player=policy", "record.failures=true", "record.video=false", "episodes=5")
    found = rlinf_vla("record", "run=told", "output=played", *keep)
    assert found.code == 0, found.err
    assert len(LeRobotReader(tmp_path / "played")) == 5
    several = rlinf_vla("label", "mixed", "played", "value=value/value", "output=both")
    assert several.code == 0, several.err
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["mixed", "played"]


@pytest.mark.parametrize(
    "recipe", ["counting_value", pytest.param("counting_recap", marks=pytest.mark.nightly)]
)
def test_a_resumed_run_ends_in_the_same_bits(
    rlinf_vla: CommandLine, mixed: Counting, train: Train, tmp_path: Path, recipe: str
) -> None:
    if recipe == "counting_recap":
        train("value", *SHORT, recipe="counting_value")
        assert rlinf_vla("label", "mixed", "value=value/value", "output=labelled").code == 0
    words = (
        (*SHORT, UNPLAYED, "algorithm.demonstrations.dataset=labelled")
        if (recipe == "counting_recap")
        else SHORT
    )
    whole = train("whole", *words, recipe=recipe)
    train("parts", *words, "iterations=2", recipe=recipe)
    assert rlinf_vla("train", "run=parts", "iterations=4").code == 0
    assert_same_files(whole, tmp_path / "parts", 4)


def test_progress_towards_success_is_a_reward(
    rlinf_vla: CommandLine, mixed: Counting, train: Train, tmp_path: Path
) -> None:
    train("value", *SHORT, recipe="counting_value")
    assert rlinf_vla("export", "run=value", "output=exported").code == 0
    one, other = (
        load_file(tmp_path / name / "heads.safetensors") for name in ("value/value", "exported")
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    words = ("reward=progress", "reward.options.checkpoint=exported", "iterations=1", UNPLAYED)
    train("ppo", *words, recipe="counting_ppo")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "label needs a dataset, a model and an output"),
        (["mixed", "value=nothing", "output=x"], "value=nothing holds no model of values: give"),
        (["mixed", "value=mixed", "output=x"], "value=mixed holds no model of values: give"),
        (["mixed", "value=x", "output=mixed"], "mixed is not empty: choose another"),
        (["nowhere", "value=x", "output=x"], "nowhere is not a directory"),
        (["mixed", "value=x", "output=x", "steps=0"], "steps=0 is out of range"),
        (["mixed", "value=x", "output=x", "positiv=0.3"], "label has no key positiv; did you mean"),
        (
            ["mixed", "value=x", "output=mixed/x"],
            "output=mixed/x is inside of mixed, which is copied",
        ),
        (["mixed", "./mixed", "value=x", "output=x"], "two of the datasets are called mixed"),
    ],
)
def test_mistakes_are_one_line(
    rlinf_vla: CommandLine, mixed: Counting, words: list[str], complaint: str
) -> None:
    assert complaint in rlinf_vla("label", *words).complaint


@pytest.mark.parametrize(
    ("recipe", "words", "complaint"),
    [
        (
            "value",
            ["algorithm.demonstrations.dataset=null"],
            "algorithm=value learns from recorded",
        ),
        (
            "recap",
            ["algorithm.demonstrations.dataset=null"],
            "algorithm=recap learns from labelled",
        ),
        ("recap", [], "mixed has no feature advantage_positive: label it with"),
        (
            "recap",
            ["algorithm=sft", "algorithm.demonstrations.action_key=moves"],
            "mixed has no feature moves (it has ",
        ),
        ("recap", ["model.checkpoint=plain"], "algorithm=recap: model=linear does not read"),
        ("ppo", ["reward=progress"], "reward.options.checkpoint has no value: train a model"),
        (
            "ppo",
            ["reward=progress", "reward.options.checkpoint=mixed"],
            "reward.options.checkpoint=mixed holds no model of values",
        ),
    ],
)
def test_what_is_missing_is_said_before_simulators_start(
    rlinf_vla: CommandLine, mixed: Counting, recipe: str, words: list[str], complaint: str
) -> None:
    LinearPolicy(LinearOptions(chunk=2)).save(Path("plain"))
    opened = len(mixed.plugin.created)
    found = rlinf_vla(*mixed.arguments("train", f"counting_{recipe}", *words))
    assert found.complaint.startswith(complaint)
    assert len(mixed.plugin.created) == opened
    assert not Path("runs").exists(), "nor is there a run directory"


def test_a_policy_plays_the_same_in_a_recording_as_in_an_evaluation(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are executed action by action, and drawn where they begin."""
    calls = list[int]()
    original = Actor.act

    def act(actor: Actor, inputs: object, episodes: object, step: torch.Tensor) -> object:
        calls.extend(step.tolist())
        return original(actor, inputs, episodes, step)  # type: ignore[arg-type]

    monkeypatch.setattr(Actor, "act", act)
    keep = ["record.player=policy", "record.failures=true", "record.video=false", "episodes=6"]
    for name, words in (("whole", []), ("late", ["record.first=2", "episodes=4"])):
        command = counting.arguments("record", "counting_ppo", f"output={name}", *keep, *words)
        found = rlinf_vla(*command)
        assert found.code == 0, found.err
    whole, late = LeRobotReader(tmp_path / "whole"), LeRobotReader(tmp_path / "late")
    assert len(whole) == 6 and len(late) == 4 and "expert_action" not in whole.features
    for number in range(4):
        one, other = whole.episode(number + 2, ["action"]), late.episode(number, ["action"])
        assert np.array_equal(one.columns["action"], other.columns["action"])
    assert any(step % 2 == 0 for step in calls)
