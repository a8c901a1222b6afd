"""Small random datasets, and their contents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlinf_vla.data.lerobot_format import ACTION, DONE, REWARD, STATE, SUCCESS, Column, Feature
from rlinf_vla.data.lerobot_writer import LeRobotWriter

FRONT, WRIST = "observation.images.front", "observation.images.wrist"
FPS = 10


def features(video: bool) -> dict[str, Feature]:
    return {
        STATE: Feature("float32", (3,)),
        ACTION: Feature("float32", (2,), ["dx", "dy"]),
        REWARD: Feature("float32", (1,)),
        DONE: Feature("bool", (1,)),
        SUCCESS: Feature("bool", (1,)),
        FRONT: Feature.camera((32, 48), video),
        WRIST: Feature.camera((16, 16), video),
    }


def episode(length: int, seed: int, video: bool = False) -> dict[str, Column]:
    """Random numbers; the brightness of the images identifies the frames, also after lossy compression."""
    generator = np.random.default_rng(seed)
    found: dict[str, Column] = {}
    for key, feature in features(video).items():
        if feature.is_camera:
            levels = 20 + (37 * (seed + np.arange(length)) % 200)
            noise = generator.integers(0, 3 if video else 50, (length, *feature.shape))
            found[key] = (levels[:, None, None, None] + noise).astype(np.uint8)
        else:
            shape = (length,) if feature.shape == (1,) else (length, *feature.shape)
            found[key] = generator.standard_normal(shape).astype(feature.dtype)
    return found


def write(
    directory: Path, lengths: tuple[int, ...] = (5, 3, 7), video: bool = False
) -> list[dict[str, Column]]:
    """Episode ``i`` has task ``task i % 2``."""
    written = [episode(length, seed, video) for seed, length in enumerate(lengths)]
    with LeRobotWriter(directory, FPS, features(video), "toy") as writer:
        for number, frames in enumerate(written):
            writer.add_episode(frames, f"task {number % 2}")
    return written
