"""Baseline of ``rlinf-vla bench env``: LIBERO's own vector environment, as its evaluation uses it.

One process per environment, a hard reset per episode, an image at every control step. The program
may run in a Python environment that has LIBERO but not this package (``core/bootstrap.py``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_vla.benchmarks.simulators.timed import timed
from rlinf_vla.envs.libero.scene import WAIT, import_libero

if TYPE_CHECKING:
    from rlinf_vla.benchmarks.simulators import Baseline
    from rlinf_vla.envs.libero.config import LiberoConfig


def variants(config: LiberoConfig) -> dict[str, LiberoConfig]:
    return {
        f"{rendering}, {size} x {size}": replace(
            config, rendering=rendering, image_size=size, processes=None
        )
        for rendering in ("exact", "lazy", "fast")
        for size in (128, 256)
    } | {"no images": replace(config, cameras=[], processes=None)}


def baselines(config: LiberoConfig, episodes: int) -> list[Baseline]:
    """LIBERO's SubprocVectorEnv, on the first of the tasks."""
    from rlinf_vla.benchmarks.simulators import Baseline
    from rlinf_vla.core import bootstrap
    from rlinf_vla.envs import mujoco_gl as gl
    from rlinf_vla.envs.libero.plugin import episode_limit, files_of, simulator_options
    from rlinf_vla.envs.libero.suites import selected_tasks

    options = simulator_options(config)
    work = {name: options[name] for name in ("image_size", "wait_steps", "seed")} | files_of(
        selected_tasks(config)[0]
    )
    work |= {
        "num_envs": config.num_envs,
        "episode_limit": episode_limit(config),
        "episodes": episodes,
    }
    work |= {"cameras": list(options["cameras"].values())}
    renderer = gl.find(config.renderer, config.python)
    return [
        Baseline(
            name,
            images,
            (
                str(bootstrap.__file__),
                "benchmarks.simulators.libero",
                json.dumps(work | {"images": images}),
            ),
            gl.environment(renderer.backend if images else "none"),
            config.python,
        )
        for name, images in (("SubprocVectorEnv, images", True), ("SubprocVectorEnv, state", False))
        if config.seen() or not images
    ]


def main(work: dict[str, Any]) -> None:
    make = import_libero()
    from libero.libero.envs.venv import SubprocVectorEnv

    count = work["num_envs"]
    cameras = list(work["cameras"]) if work["images"] else []
    images = (
        {
            "camera_names": cameras,
            "camera_heights": work["image_size"],
            "camera_widths": work["image_size"],
        }
        if cameras
        else {}
    )
    options = {
        "use_camera_obs": bool(cameras),
        "has_offscreen_renderer": bool(cameras),
        "ignore_done": True,
        **images,
    }
    envs = SubprocVectorEnv([lambda: make(bddl_file_name=work["bddl"], **options)] * count)
    with np.load(work["init_states"], allow_pickle=False) as stored:
        states = [stored["states"][row % 50] for row in range(count)]
    random = np.random.RandomState(0).uniform(-1, 1, (work["episode_limit"], count, len(WAIT)))
    actions = [*np.broadcast_to(WAIT, (work["wait_steps"], count, len(WAIT))), *random]
    envs.seed(work["seed"])

    def play(_: int) -> None:
        envs.reset()
        envs.set_init_state(states)
        for action in actions:
            envs.step(action)

    timed(play, work["episodes"])
    envs.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
