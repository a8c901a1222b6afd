"""Baseline of ``rlinf-vla bench env``: Meta-World's own vector environment.

It has one process per environment. The program may run in a Python environment that has metaworld
but not this package (``core/bootstrap.py``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_vla.benchmarks.simulators.timed import timed

if TYPE_CHECKING:
    from rlinf_vla.benchmarks.simulators import Baseline
    from rlinf_vla.envs.metaworld.config import MetaWorldConfig


def variants(config: MetaWorldConfig) -> dict[str, MetaWorldConfig]:
    return {
        f"{rendering}, {size} x {size}": replace(
            config, rendering=rendering, image_size=size, processes=None
        )
        for rendering in ("exact", "fast")
        for size in (128, 256)
    } | {"no images": replace(config, cameras=[], processes=None)}


def baselines(config: MetaWorldConfig, episodes: int) -> list[Baseline]:
    """Meta-World's AsyncVectorEnv on the first of the tasks, with its first camera."""
    from rlinf_vla.benchmarks.simulators import Baseline
    from rlinf_vla.core import bootstrap
    from rlinf_vla.envs import mujoco_gl
    from rlinf_vla.envs.metaworld.plugin import episode_limit, simulator_options

    options = simulator_options(config)
    renderer = mujoco_gl.find(config.renderer, config.python, bool(config.cameras))
    work = {
        "task": next(iter(options["tasks"])),
        "num_envs": config.num_envs,
        "size": config.image_size,
        "episodes": episodes,
    }
    work |= {
        "steps": episode_limit(config),
        "repeat": config.action_repeat,
        "cameras": list(options["cameras"].values()),
    }
    return [
        Baseline(
            name,
            images,
            (
                str(bootstrap.__file__),
                "benchmarks.simulators.metaworld",
                json.dumps(work | {"images": images}),
            ),
            mujoco_gl.environment(renderer.backend if images else "none"),
            config.python,
        )
        for name, images in (("AsyncVectorEnv, images", True), ("AsyncVectorEnv, state", False))
        if config.cameras or not images
    ]


def main(work: dict[str, Any]) -> None:
    import gymnasium
    import metaworld  # noqa: F401  (registers its environments)

    count, size = work["num_envs"], work["size"]
    options: dict[str, Any] = {
        "envs_list": [work["task"]] * count,
        "seed": 1,
        "vector_strategy": "async",
    }
    if work["images"]:
        options |= {
            "render_mode": "rgb_array",
            "camera_name": work["cameras"][0],
            "width": size,
            "height": size,
        }
    envs: Any = gymnasium.make_vec("Meta-World/custom-mt-envs", **options)
    actions = np.random.RandomState(0).uniform(-1, 1, (work["steps"], count, 4)).astype(np.float32)

    def play(_: int) -> None:
        envs.reset()
        for action in actions:
            for _ in range(work["repeat"]):
                envs.step(action)
            if work["images"]:
                envs.call("render")

    timed(play, work["episodes"])
    envs.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
