"""Baseline of ``rlinf-vla bench env``: Genesis' own loop on the same scene and batch.

Sends joint targets and calls ``scene.step``; with images, also ``camera.render`` for all
environments at every control step, with the robot's visual meshes. ``protocols.Baseline`` defines
its output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from .loading import scene_from
from .world import ARM, POSTURE_RAD, SUBSTEPS, add_camera, assemble, build, start


def main(work: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    options, count = work["options"], work["num_envs"]
    scene = scene_from(options["scene"], Path(options["path"]))
    made, robot, _ = assemble(start("cpu"), scene, low_poly=False, substeps=1, split_envs=True)
    seen = options["cameras"] if work["images"] else []
    cameras = [add_camera(made, scene.cameras[name], (options["image_size"],) * 2) for name in seen]
    build(made, robot, count)
    posture, generator = torch.tensor(POSTURE_RAD).expand(count, 9), torch.Generator().manual_seed(0)
    for episode in range(1 + work["episodes"]):  # the first one warms up
        if episode == 1:
            print("begin", flush=True)
        made.reset()
        robot.set_qpos(posture)
        for _ in range(work["episode_limit"]):
            targets = posture.clone()
            targets[:, ARM] += 0.1 * torch.randn(count, 7, generator=generator)
            robot.control_dofs_position(targets)
            for _ in range(SUBSTEPS):
                made.step(update_visualizer=False)
            for camera in cameras:
                camera.render(force_render=True)
    print("end", flush=True)
    sys.stdin.read()  # the benchmark inspects the processes first


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
