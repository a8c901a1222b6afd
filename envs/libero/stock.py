"""Baseline of ``rlinf-vla bench env``: LIBERO's own vector environment, as its evaluation uses it.

One process per environment, a hard reset per episode, an image at every control step. Runs by
bootstrap, with the work as JSON on the command line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from .scene import WAIT, import_libero


def play(envs: Any, states: Any, actions: Any) -> None:
    envs.reset()
    envs.set_init_state(states)
    for action in actions:
        envs.step(action)


def main(work: dict[str, Any]) -> None:
    make = import_libero()
    from libero.libero.envs.venv import SubprocVectorEnv

    count, cameras = work["num_envs"], list(work["cameras"]) if work["images"] else []
    images = {"camera_names": cameras, "camera_heights": work["image_size"], "camera_widths": work["image_size"]} if cameras else {}
    options = {"use_camera_obs": bool(cameras), "has_offscreen_renderer": bool(cameras), "ignore_done": True, **images}
    envs = SubprocVectorEnv([lambda: make(bddl_file_name=work["bddl"], **options)] * count)
    with np.load(work["init_states"], allow_pickle=False) as stored:
        states = [stored["states"][row % 50] for row in range(count)]
    random = np.random.RandomState(0).uniform(-1, 1, (work["episode_limit"], count, len(WAIT)))
    actions = [*np.broadcast_to(WAIT, (work["wait_steps"], count, len(WAIT))), *random]
    envs.seed(work["seed"])
    play(envs, states, actions)
    print("begin", flush=True)
    for _ in range(work["episodes"]):
        play(envs, states, actions)
    print("end", flush=True)
    sys.stdin.read()
    envs.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
