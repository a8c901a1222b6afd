"""Compares reading and writing with lerobot itself.

``LEROBOT_PYTHON``: a Python that has it (``uv pip install "lerobot[dataset]==0.6.1"``, Python 3.12)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlinf_vla.data.lerobot_format import ACTION, REWARD, STATE
from rlinf_vla.data.lerobot_reader import LeRobotReader
from tests.data import lerobot_peer
from tests.data.episodes import features, write
from tests.data.old_versions import V21, rewrite

PYTHON = os.environ.get("LEROBOT_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="LEROBOT_PYTHON names no Python with lerobot"
)


def lerobot(*arguments: object) -> None:
    assert PYTHON is not None
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [PYTHON, lerobot_peer.__file__, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, env=offline)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_lerobot_opens_what_we_write(tmp_path: Path, kind: str) -> None:
    written = write(tmp_path / "data", video=kind == "video")
    lerobot("dump", tmp_path / "data", tmp_path / "seen.npz")
    seen = np.load(tmp_path / "seen.npz")
    assert (
        seen["episodes"] == 3
        and seen["task"].tolist() == ["task 0"] * 5 + ["task 1"] * 3 + ["task 0"] * 7
    )
    for key, feature in features(False).items():
        truth = np.concatenate([frames[key] for frames in written])
        found = seen[f"frames/{key}"]
        if feature.is_camera:
            found = np.rint(found * 255).transpose(0, 2, 3, 1)
            assert np.abs(found - truth.astype(float)).max() < (12 if kind == "video" else 0.5)
        else:
            assert np.array_equal(found, truth)
    stored = json.loads((tmp_path / "data/meta/stats.json").read_text())
    for key, statistics in stored.items():
        for name, value in statistics.items():
            assert np.array_equal(seen[f"stats/{key}/{name}"], np.array(value)), (key, name)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_we_read_what_lerobot_records(tmp_path: Path, kind: str) -> None:
    lerobot("record", tmp_path / "data", kind)
    reader = LeRobotReader(tmp_path / "data")
    frames = sum(
        len(list(reader.frames(reader.episode(number, []), key)))
        for number in range(3)
        for key in reader.cameras
    )
    assert frames == 2 * sum(lerobot_peer.LENGTHS)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_its_converter_makes_the_same_episodes_of_version_2_1(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_vla.data.lerobot_format.VIDEO_FILE_MB", 0)
    write(tmp_path / "new", video=kind == "video")
    rewrite(tmp_path / "new", tmp_path / "old", V21)
    shutil.copytree(tmp_path / "old", tmp_path / "converted")
    lerobot("convert", tmp_path / "converted", "converted")
    old, new = (LeRobotReader(tmp_path / name) for name in ("old", "converted"))
    assert old.listed() == new.listed()
    for number in range(3):
        one, other = (each.episode(number, [STATE, ACTION, REWARD]) for each in (old, new))
        assert one.instruction == other.instruction
        for key, values in one.columns.items():
            assert np.array_equal(values, other.columns[key])
        for key in old.cameras:
            for frame, same in zip(old.frames(one, key), new.frames(other, key), strict=True):
                assert np.array_equal(frame, same)
