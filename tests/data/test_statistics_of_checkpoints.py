"""Statistics for checkpoints, compared with loops and numpy in float64, and read by the policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.data.checkpoint_statistics import (
    Numbers,
    flags,
    write_lerobot,
    write_openpi,
    write_openvla,
)
from rlinf_vla.data.lerobot_format import ACTION, REWARD, STATE, Column
from rlinf_vla.models import lerobot
from rlinf_vla.models.normalizer import Normalizer, relative
from rlinf_vla.models.openvla.actions import ActionTokenizer, ProprioNormalizer
from rlinf_vla.models.openvla.checkpoint import read_statistics
from rlinf_vla.models.pi0.checkpoint import read_normalizers
from tests.data.episodes import write

HORIZON = 4
DELTA = [1, -1]
"""The first action is relative to the state."""


@pytest.fixture
def written(tmp_path: Path) -> list[dict[str, Column]]:
    """Episodes of 5, 3 and 7 frames with states of 3 and actions of 2 numbers."""
    return write(tmp_path / "pushes")


@pytest.fixture
def numbers(tmp_path: Path, written: list[dict[str, Column]]) -> Numbers:
    return Numbers.read(tmp_path / "pushes", ACTION, STATE)


def states(written: list[dict[str, Column]]) -> Column:
    return np.concatenate([frames[STATE] for frames in written]).astype(np.float64)


def chunks(written: list[dict[str, Column]], horizon: int, mask: list[int]) -> torch.Tensor:
    """``[N, horizon, D]``, one frame after another; beyond the end the last action is repeated."""
    found = []
    for frames in written:
        actions = torch.from_numpy(frames[ACTION])
        for first in range(len(actions)):
            rows = [min(first + step, len(actions) - 1) for step in range(horizon)]
            dimensions = [i for i, flag in enumerate(mask) if flag > 0]
            state = torch.from_numpy(frames[STATE][first])
            found.append(relative(actions[rows], state, dimensions))
    return torch.stack(found)


def check(found: dict[str, Any], values: Column) -> None:
    """Raises AssertionError unless the statistics are those of ``[N, D]``."""
    rows = values.astype(np.float64)
    expected = {
        "mean": rows.mean(0),
        "std": rows.std(0),
        "min": rows.min(0),
        "max": rows.max(0),
        "q01": np.quantile(rows, 0.01, axis=0),
        "q99": np.quantile(rows, 0.99, axis=0),
    }
    for name in expected.keys() & found.keys():
        assert found[name] == pytest.approx(expected[name].tolist(), rel=1e-12, abs=1e-12), name


@pytest.mark.parametrize("mask", [[], DELTA])
def test_openpi(
    tmp_path: Path, written: list[dict[str, Column]], numbers: Numbers, mask: list[int]
) -> None:
    write_openpi(tmp_path / "model/assets/pushes", numbers, HORIZON, mask)
    file = tmp_path / "model/assets/pushes/norm_stats.json"
    found = json.loads(file.read_text())["norm_stats"]
    assert {key: set(value) for key, value in found.items()} == {
        key: {"mean", "std", "q01", "q99"} for key in ("state", "actions")
    }
    check(found["state"], states(written))
    actions = chunks(written, HORIZON, mask)
    check(found["actions"], actions.flatten(0, 1).numpy())
    normalised = {
        pi05: read_normalizers(tmp_path / "model", {"pi05": pi05}, "pushes")[1](actions)
        for pi05 in (False, True)
    }
    assert torch.allclose(normalised[False].mean((0, 1)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(normalised[False].std((0, 1), correction=0), torch.ones(2), atol=1e-4)
    assert (normalised[True].abs() <= 1 + 1e-4).float().mean() >= 0.96


def test_openvla(tmp_path: Path, written: list[dict[str, Column]], numbers: Numbers) -> None:
    write_openvla(tmp_path / "model", [numbers], [1, -1])
    dataset = read_statistics(tmp_path / "model", {}, None, None)
    found = dataset.statistics
    assert dataset.name == "pushes" and not dataset.inherited
    assert (found["num_transitions"], found["num_trajectories"]) == (15, 3)
    assert found["action"]["mask"] == [True, False]
    actions = chunks(written, 1, [])[:, 0]
    check(found["action"], actions.numpy())
    check(found["proprio"], states(written))
    tokenizer = ActionTokenizer(32000, 256, found["action"])
    inside = actions[:, 0].double()
    low, high = found["action"]["q01"][0], found["action"]["q99"][0]
    assert torch.allclose(
        tokenizer.normalise(actions.double())[:, 0],
        (2 * (inside - low) / (high - low) - 1).clamp(-1, 1),
    )
    assert ProprioNormalizer(found["proprio"])(torch.zeros(1, 3)).shape == (1, 3)


def test_lerobot(tmp_path: Path, written: list[dict[str, Column]], numbers: Numbers) -> None:
    model = tmp_path / "model"
    write_lerobot(model, numbers, HORIZON, DELTA)
    found = json.loads((model / "stats.json").read_text())
    actions = chunks(written, HORIZON, DELTA)
    check(found[STATE], states(written))
    check(found[ACTION], actions.flatten(0, 1).numpy())
    modes = {"STATE": "QUANTILES", "ACTION": "MEAN_STD"}
    for file, step in lerobot.PROCESSORS.values():
        normalizer = {
            "registry_name": step,
            "config": {"norm_map": modes},
            "state_file": "stats.safetensors",
        }
        (model / file).write_text(json.dumps({"steps": [normalizer]}))
    statistics, kinds = lerobot.read_statistics(model, {})
    normalised = Normalizer(statistics["actions"], kinds["actions"])(actions)
    assert torch.allclose(normalised.mean((0, 1)), torch.zeros(2), atol=1e-5)
    Normalizer(statistics["state"], kinds["state"])


def test_datasets_count_as_one(
    tmp_path: Path, written: list[dict[str, Column]], numbers: Numbers
) -> None:
    more = write(tmp_path / "more", lengths=(2, 9))
    joined = Numbers.joined([numbers, Numbers.read(tmp_path / "more", ACTION, STATE)])
    check(joined.state_statistics(), states([*written, *more]))
    actions = chunks([*written, *more], HORIZON, [])
    check(joined.action_statistics(HORIZON), actions.flatten(0, 1).numpy())


def test_datasets_of_other_robots_are_refused(tmp_path: Path, numbers: Numbers) -> None:
    swapped = Numbers.read(tmp_path / "pushes", STATE, ACTION)
    with pytest.raises(
        UserError, match="pushes has states of 2 numbers, pushes of 3: give datasets"
    ):
        Numbers.joined([numbers, swapped])


def test_a_policy_without_states_has_none(tmp_path: Path, written: object) -> None:
    write_openvla(tmp_path, [Numbers.read(tmp_path / "pushes", REWARD, None)], None)
    found = json.loads((tmp_path / "dataset_statistics.json").read_text())["pushes"]
    assert "proprio" not in found and found["action"]["mask"] == [True]


def test_masks() -> None:
    assert flags([2, -1], 4, "mask") == [True, True, False, False]
    with pytest.raises(UserError, match=r"mask=\[6, -1\] covers 7 dimensions, there are 4"):
        flags([6, -1], 4, "mask")


def test_a_relative_action_needs_a_state_of_its_dimension(tmp_path: Path, written: object) -> None:
    swapped = Numbers.read(tmp_path / "pushes", STATE, ACTION)
    with pytest.raises(
        UserError, match=r"delta_mask=\[3\] makes action 2 relative to the state, .* 2"
    ):
        write_openpi(tmp_path / "model", swapped, 1, [3])
    assert not (tmp_path / "model").exists()
