"""What the cameras see at the beginning of some tasks, to compare Python environments with. Runs in any that has LIBERO, by bootstrap:

MUJOCO_GL=egl python envs/bootstrap.py libero.snapshots OUTPUT.npz < tasks.json
"""

from __future__ import annotations

import json
import sys

import numpy as np

from .scene import Scene
from .simulator import stack

SIZE = 256
CAMERAS = {"base": "agentview", "wrist": "robot0_eye_in_hand"}
OPTIONS = {"renderer": "", "rendering": "exact", "convention": "", "wait_steps": 10}


def main() -> None:
    arrays = {"stack": np.array(json.dumps(stack(OPTIONS)))}
    for task in json.load(sys.stdin):
        scene = Scene(task["bddl"], task["init_states"], seed=0, cameras=CAMERAS, size=SIZE, rendering="lazy")
        episode = scene.begin(0, 10)
        for name, image in scene.images(episode).items():
            arrays[f"{task['name']}/{name}"] = image[::-1]
        arrays[f"{task['name']}/qpos"] = episode.seen.qpos.copy()
        scene.close()
    np.savez(sys.argv[1], **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
