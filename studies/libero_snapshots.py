"""Save camera images of some tasks and whether lazy rendering is exact, to compare environments.

Runs in any Python environment with LIBERO, by bootstrap:
MUJOCO_GL=egl python rlinf_vla/core/bootstrap.py studies.libero_snapshots OUTPUT.npz < tasks.json
"""

from __future__ import annotations

import json
import sys

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.envs.libero.scene import Scene
from rlinf_vla.envs.libero.simulator import stack

SIZE = 256
CHUNK = 8
CAMERAS = {"base": "agentview", "wrist": "robot0_eye_in_hand"}
OPTIONS = {"renderer": "", "rendering": "exact", "convention": "", "wait_steps": 10}


def looked_at(scene: Scene, exact: bool) -> list[NDArray[np.uint8]]:
    """Return the images after a chunk of random actions."""
    scene.exact = exact
    episode = scene.begin(0, 10)
    for action in np.random.RandomState(0).uniform(-1, 1, (CHUNK, 7)):
        scene.step(episode, action)
    return [image.copy() for image in scene.images(episode).values()]


def main() -> None:
    arrays = {"stack": np.array(json.dumps(stack(OPTIONS)))}
    for task in json.load(sys.stdin):
        scene = Scene(
            task["bddl"], task["init_states"], seed=0, cameras=CAMERAS, size=SIZE, rendering="lazy"
        )
        episode = scene.begin(0, 10)
        for name, image in scene.images(episode).items():
            arrays[f"{task['name']}/{name}"] = image[::-1]
        arrays[f"{task['name']}/qpos"] = episode.seen.qpos.copy()
        if task["chunk"]:
            lazy, exact = looked_at(scene, False), looked_at(scene, True)
            arrays[f"{task['name']}/lazy_is_exact"] = np.array(
                all(map(np.array_equal, lazy, exact))
            )
        scene.close()
    np.savez(sys.argv[1], **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
