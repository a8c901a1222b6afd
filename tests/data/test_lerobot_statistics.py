"""Compared with numpy on all values at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlinf_vla.data.lerobot_format import ACTION, STATE
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.data.lerobot_statistics import QUANTILES, histogram, of_images, of_vectors
from tests.data.episodes import FRONT, WRIST, write


def test_vectors() -> None:
    values = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    found = of_vectors(values)
    assert found["count"] == [50]
    for name, function in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        assert found[name] == pytest.approx(function(values.astype(np.float64), axis=0).tolist())
    for name, q in QUANTILES.items():
        assert found[name] == pytest.approx(np.quantile(values, q, axis=0).tolist(), abs=1e-6)
    assert of_vectors(np.array([True, False]))["mean"] == [0.5]


@pytest.mark.parametrize("values", [range(256), range(7, 9), [250]])
def test_images(values: range) -> None:
    images = np.random.default_rng(1).choice(list(values), (6, 8, 10, 3)).astype(np.uint8)
    found = of_images(histogram(images[:2]) + histogram(images[2:]), len(images))
    assert found["count"] == [6] and np.shape(found["mean"]) == (3, 1, 1)
    pixels = images.reshape(-1, 3) / 255
    for name, function in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        assert np.ravel(found[name]) == pytest.approx(function(pixels, axis=0))
    for name, q in QUANTILES.items():
        assert np.ravel(found[name]) == pytest.approx(
            np.quantile(pixels, q, axis=0, method="inverted_cdf")
        )


def test_of_the_episodes_and_of_the_dataset(tmp_path: Path) -> None:
    written = write(tmp_path / "data")
    whole = json.loads((tmp_path / "data/meta/stats.json").read_text())
    assert whole[STATE] == of_vectors(np.concatenate([frames[STATE] for frames in written]))
    images = np.concatenate([frames[FRONT] for frames in written])
    assert whole[FRONT] == of_images(histogram(images), len(images))
    (row, *_) = pq.read_table(
        tmp_path / "data/meta/episodes/chunk-000/file-000.parquet"
    ).to_pylist()
    assert row[f"stats/{STATE}/mean"] == of_vectors(written[0][STATE])["mean"]
    assert row[f"stats/{FRONT}/q50"] == of_images(histogram(written[0][FRONT]), 5)["q50"]


def test_statistics_agree_with_lerobot() -> None:
    """All but its quantiles, which are averages over episodes; it computes a variance as a difference of squares, in float32."""
    directory = Path(__file__).parent / "fixtures/image"
    reader = LeRobotReader(directory)
    theirs = json.loads((directory / "meta/stats.json").read_text())
    episodes = [reader.episode(number, [STATE, ACTION]) for number in range(len(reader))]
    ours = {
        key: of_vectors(np.concatenate([episode.columns[key] for episode in episodes]))
        for key in (STATE, ACTION)
    }
    for key in (FRONT, WRIST):
        images = np.stack([frame for episode in episodes for frame in reader.frames(episode, key)])
        ours[key] = of_images(histogram(images), len(images))
    for key, statistics in ours.items():
        assert statistics.keys() == theirs[key].keys()
        for name in ("min", "max", "mean", "std", "count"):
            assert np.array(statistics[name]) == pytest.approx(
                np.array(theirs[key][name]), abs=2e-4
            ), (key, name)
