"""Real lerobot, in a separate Python (it needs another torch): ``python lerobot_peer.py`` and
``record DIR video|image``, ``dump DIR OUT.npz`` or ``convert DIR NAME``.

``record`` of lerobot 0.6.1 made the folders in ``fixtures/``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

LENGTHS = (5, 4, 6)
TASKS = ("push the cube", "stack the cubes", "push the cube")
FPS, SIZE = 10, 64


def frame(episode: int, step: int) -> dict[str, np.ndarray]:
    """The recording: brightness and a bar identify the frames."""
    number = sum(LENGTHS[:episode]) + step
    last = step == LENGTHS[episode] - 1
    front = np.full((SIZE, SIZE, 3), (16 * number + 8, 100, 50), np.uint8)
    front[:, 4 * number : 4 * number + 4] = 255
    wrist = np.full((SIZE, SIZE, 3), (0, 30, 250 - 16 * number), np.uint8)
    return {
        "observation.state": np.array([episode, step, number], np.float32),
        "action": np.array([step / 10, -episode / 10], np.float32),
        "next.reward": np.array([step / 2], np.float32),
        "next.done": np.array([last]),
        "next.success": np.array([last and episode != 1]),
        "observation.images.front": front,
        "observation.images.wrist": wrist,
    }


def record(directory: Path, kind: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    example = frame(0, 0)
    features = {
        key: {"dtype": str(value.dtype), "shape": value.shape, "names": None}
        for key, value in example.items()
    }
    for key in features:
        if "images" in key:
            features[key] |= {"dtype": kind, "names": ["height", "width", "channels"]}
    dataset = LeRobotDataset.create(
        "local/peer", FPS, features, directory, robot_type="toy", use_videos=kind == "video"
    )
    for episode, (length, task) in enumerate(zip(LENGTHS, TASKS, strict=True)):
        for step in range(length):
            dataset.add_frame(frame(episode, step) | {"task": task})
        dataset.save_episode()
    dataset.finalize()


def dump(directory: Path, target: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("local/peer", root=directory)
    items = [dataset[index] for index in range(len(dataset))]
    found = {
        f"frames/{key}": np.stack([np.asarray(item[key]) for item in items])
        for key in items[0]
        if key != "task"
    }
    found["task"] = np.array([item["task"] for item in items])
    found["episodes"] = np.array(dataset.meta.total_episodes)
    for key, statistics in dataset.meta.stats.items():
        found |= {f"stats/{key}/{name}": value for name, value in statistics.items()}
    np.savez(target, **found)


def convert(directory: Path, name: str) -> None:
    """Convert v2.1 to v3.0, in place."""
    from lerobot.scripts.convert_dataset_v21_to_v30 import convert_dataset

    convert_dataset(f"local/{name}", root=directory, push_to_hub=False)


if __name__ == "__main__":
    verb, where, argument = sys.argv[1:]
    if verb == "dump":
        dump(Path(where), Path(argument))
    else:
        {"record": record, "convert": convert}[verb](Path(where), argument)
