"""Returns of recorded episodes, their labels, and copies of datasets that have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from rlinf_vla.algorithms.advantage_labels import advantages, best, returns_to_go
from rlinf_vla.algorithms.base import DemonstrationConfig, WeightedDataset
from rlinf_vla.algorithms.conditions import told
from rlinf_vla.algorithms.recap import LabelledDemonstrationConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import PolicySpec
from rlinf_vla.core.types import Inputs, Observation
from rlinf_vla.data.from_dataset import dataset_demonstrations
from rlinf_vla.data.lerobot_copy import copy_with_features
from rlinf_vla.data.lerobot_format import ACTION, STATE, SUCCESS, Feature
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.data.value_labels import (
    ADVANTAGE,
    FEATURES,
    POSITIVE,
    RETURN,
    VALUE,
    Labelling,
    best_of_tasks,
    dataset_returns,
    value_labels,
)
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.data.episodes import write as write_random
from tests.data.old_versions import V20, V21, rewrite

HUMAN = "intervention"
LENGTHS = (4, 9, 6, 3)
SUCCEEDS = (True, False, True, False)
"""Episodes 0 and 2 are of one task, 1 and 3 of another."""


class Sees(LinearPolicy):
    """Keeps the state and the length of the instruction; its value is that of the state."""

    def __init__(self) -> None:
        super().__init__(LinearOptions(chunk=1, action_dim=2))
        self.spec = PolicySpec(chunk=1, action_dim=2, state_dim=1, images={})

    def prepare(self, obs: Observation) -> Inputs:
        lengths = torch.tensor([len(text) for text in obs.instruction])
        return {"state": obs.state, "words": lengths}

    def encode(self, inputs: Inputs) -> Tensor:
        return inputs["state"][:, 0]

    def value(self, features: Tensor) -> Tensor:
        return -features / 10


def write(
    directory: Path,
    lengths: tuple[int, ...] = LENGTHS,
    success: bool = True,
    succeeds: tuple[bool, ...] = SUCCEEDS,
) -> str:
    features = {
        STATE: Feature("float32", (1,)),
        ACTION: Feature("float32", (2,)),
        HUMAN: Feature("bool", (1,)),
    }
    features |= {SUCCESS: Feature("bool", (1,))} if success else {}
    with LeRobotWriter(directory, 10, features) as writer:
        for number, length in enumerate(lengths):
            steps = np.arange(length)
            frames: dict[str, Any] = {
                STATE: (steps + number).astype(np.float32),
                ACTION: np.zeros((length, 2), np.float32),
                HUMAN: (number == 3) & (steps == 1),
            }
            if success:
                frames[SUCCESS] = (steps == length - 1) & succeeds[number]
            writer.add_episode(frames, f"task {number % 2}")
    return str(directory)


def dataset(path: str, **keys: Any) -> WeightedDataset:
    return WeightedDataset(path, 1.0, ACTION, STATE, [], **keys)


def test_every_frame_has_its_return(tmp_path: Path) -> None:
    config = DemonstrationConfig(dataset=write(tmp_path / "data"))
    seen: list[float] = []
    found, longest = dataset_returns(Sees(), config, 0.5, seen.append)
    assert longest == {"task 0": 6, "task 1": 9} and seen[-1] == 1.0
    expected = [
        returns_to_go(length, success, longest[f"task {number % 2}"], 0.5)
        for number, (length, success) in enumerate(zip(LENGTHS, SUCCEEDS, strict=True))
    ]
    assert torch.equal(found.returns, torch.cat(expected)) and found.weight is None
    assert found.episode.tolist() == [n for n, length in enumerate(LENGTHS) for _ in range(length)]
    assert found.inputs["state"][:5, 0].tolist() == [0, 1, 2, 3, 1]


def test_frames_of_a_mixture_have_weights_and_numbers_of_their_own(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a"), write(tmp_path / "b", (2, 3))]
    mixture = [WeightedDataset(path, weight) for path, weight in zip(paths, (1, 3), strict=True)]
    found, longest = dataset_returns(Sees(), DemonstrationConfig(mixture=mixture), 1.0)
    assert found.weight is not None and longest == {"task 0": 6, "task 1": 9}
    of_b = found.episode >= 4
    assert int(found.episode.max()) == 5
    assert float(found.weight[of_b].sum() / found.weight.sum()) == pytest.approx(0.75)


def test_success_is_recorded_or_said(tmp_path: Path) -> None:
    config = DemonstrationConfig(dataset=write(tmp_path / "data", success=False))
    with pytest.raises(UserError, match=r"does not record success \(next.success\)"):
        dataset_returns(Sees(), config, 1.0)
    found, _ = dataset_returns(Sees(), replace(config, all_succeed=True), 1.0)
    assert found.returns[found.episode == 1][-1] == 0


def labelled(paths: list[str], **keys: Any) -> list[Any]:
    labelling = Labelling(**{"failure": 1.0, "longest": {}, "steps": 3, "positive": 0.4} | keys)
    return value_labels(Sees(), [dataset(path) for path in paths], labelling)  # type: ignore[arg-type]


def test_labels_are_those_of_the_formulas(tmp_path: Path) -> None:
    ((reader, columns),) = labelled([write(tmp_path / "data")])
    assert len(reader) == 4
    gains = []
    for number, (length, success) in enumerate(zip(LENGTHS, SUCCEEDS, strict=True)):
        values = -(torch.arange(length) + number).float() / 10
        returns = returns_to_go(length, success, (6, 9)[number % 2], 1.0)
        gains.append(advantages(returns, values, 3))
        assert np.array_equal(columns[number][RETURN], returns)
        assert np.allclose(columns[number][VALUE], values)
        assert np.allclose(columns[number][ADVANTAGE], gains[-1], atol=1e-6)
    for numbers in ((0, 2), (1, 3)):
        own = torch.cat([gains[number] for number in numbers])
        expected = best(own, 0.4, torch.zeros(len(own), dtype=torch.bool))
        found = np.concatenate([columns[number][POSITIVE] for number in numbers])
        assert np.array_equal(found, expected)


def test_steps_of_a_person_are_positive_whatever_comes_of_them(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    ((_, without),) = labelled([path], positive=0.1)
    ((_, columns),) = labelled([path], positive=0.1, human=HUMAN)
    assert not without[3][POSITIVE].any() and columns[3][POSITIVE].tolist() == [False, True, False]
    with pytest.raises(UserError, match="has no feature person: leave human_key out"):
        labelled([path], human="person")


def test_several_datasets_are_labelled_as_one(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a"), write(tmp_path / "b", (2, 3))]
    (_, first), (_, second) = labelled(paths)
    assert [len(first), len(second)] == [4, 2]
    task = [first[0], first[2], second[0]]
    positive = np.concatenate([columns[POSITIVE] for columns in task])
    gains = torch.from_numpy(np.concatenate([columns[ADVANTAGE] for columns in task]))
    assert np.array_equal(positive, best(gains, 0.4, torch.zeros(len(gains), dtype=torch.bool)))


def test_the_models_longest_episodes_count(tmp_path: Path) -> None:
    ((_, columns),) = labelled([write(tmp_path / "data")], longest={"task 0": 12})
    assert np.array_equal(columns[0][RETURN], returns_to_go(4, True, 12, 1.0))
    assert np.array_equal(columns[1][RETURN], returns_to_go(9, False, 9, 1.0))
    ((_, columns),) = labelled([write(tmp_path / "again")], longest={"task 1": 2})
    assert columns[1][RETURN].min() == -1, "an episode that is longer than any before"


def test_the_best_of_a_task_do_not_depend_on_another() -> None:
    gains = [torch.tensor([1.0, 2.0]), torch.tensor([50.0, 60.0, 70.0, 80.0])]
    nobody = [torch.zeros(2, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)]
    found = best_of_tasks(["a", "b"], gains, nobody, 0.5)
    assert [positive.tolist() for positive in found] == [[False, True], [False, False, True, True]]


@pytest.mark.parametrize(
    ("version", "video"), [("v3", False), ("v3", True), (V20, True), (V21, False)]
)
def test_a_copy_has_the_features_and_all_else_as_it_was(
    tmp_path: Path, version: str, video: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_vla.data.lerobot_format.VIDEO_FILE_MB", 0)
    write_random(tmp_path / "v3", video=video)
    if version != "v3":
        rewrite(tmp_path / "v3", tmp_path / version, version)
    reader = LeRobotReader(tmp_path / version)
    columns = [
        {key: np.full(length, number).astype(feature.dtype) for key, feature in FEATURES.items()}
        for number, (length, _) in enumerate(reader.listed())
    ]
    (tmp_path / "copy").mkdir()
    copy_with_features(reader, tmp_path / "copy", FEATURES, columns)
    copy = LeRobotReader(tmp_path / "copy")
    assert copy.listed() == reader.listed()
    assert copy.features == reader.features | FEATURES
    for number in range(len(reader)):
        before = reader.episode(number, [STATE, ACTION])
        after = copy.episode(number, [STATE, ACTION, *FEATURES])
        assert all(
            np.array_equal(after.columns[key], value) for key, value in before.columns.items()
        )
        for key in FEATURES:
            assert np.array_equal(after.columns[key], columns[number][key])
        for camera in reader.cameras:
            for one, other in zip(
                reader.frames(before, camera), copy.frames(after, camera), strict=True
            ):
                assert np.array_equal(one, other)
    if version in ("v3",):
        statistics = json.loads((tmp_path / "copy/meta/stats.json").read_text())
        assert statistics[VALUE]["max"] == [2.0] and statistics[STATE]
    again = tmp_path / "again"
    again.mkdir()
    changed = [
        {key: value + (value.dtype != bool) for key, value in each.items()} for each in columns
    ]
    copy_with_features(copy, again, FEATURES, changed)
    assert LeRobotReader(again).episode(1, [VALUE]).columns[VALUE].tolist() == [2.0] * 3
    described = pq.read_schema(LeRobotReader(again).data_files[0]).metadata
    assert VALUE in json.loads(described[b"huggingface"])["info"]["features"]


def test_the_instructions_tell_the_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "data")
    ((reader, columns),) = labelled([path])
    (tmp_path / "copy").mkdir()
    copy_with_features(reader, tmp_path / "copy", FEATURES, columns)
    config = LabelledDemonstrationConfig(dataset=str(tmp_path / "copy"))
    found, _ = dataset_demonstrations(Sees(), config, lambda fraction: None)
    expected = [
        len(told(f"task {number % 2}", bool(positive)))
        for number, episode in enumerate(columns)
        for positive in episode[POSITIVE]
    ]
    assert found.inputs["words"].tolist() == expected
    wrong = replace(config, advantage_key=ADVANTAGE)
    with pytest.raises(UserError, match="advantage is neither true nor false in episode 0"):
        dataset_demonstrations(Sees(), wrong, lambda fraction: None)
    with pytest.raises(UserError, match="has no feature advantage_positive: label it with"):
        dataset_demonstrations(Sees(), replace(config, dataset=path), lambda fraction: None)


def test_successes_alone_can_be_imitated(tmp_path: Path) -> None:
    config = DemonstrationConfig(dataset=write(tmp_path / "data"), only_successes=True)
    found, success = dataset_demonstrations(Sees(), config, lambda fraction: None)
    assert len(found) == 4 + 6 and success == 0.5
    failures = write(tmp_path / "failures", succeeds=(False,) * 4)
    with pytest.raises(UserError, match="none of its 4 episodes succeeds"):
        dataset_demonstrations(Sees(), replace(config, dataset=failures), lambda fraction: None)
