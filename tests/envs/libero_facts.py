"""Compares our scenes with robosuite's own environment in one process with OpenGL. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any
from unittest.mock import patch

import numpy as np

from rlinf_vla.envs.libero import scene as libero_scene
from rlinf_vla.envs.libero.episode import Episode, SamplingClock
from rlinf_vla.envs.libero.scene import Scene, import_libero
from rlinf_vla.envs.libero.suites import LiberoTask, of_suite

SIZE, STEPS, WAIT_STEPS = 64, 4, 3
CAMERAS = {"base": "agentview"}
DRAWN = (("libero_spatial", 0), ("libero_spatial", 3), ("libero_object", 1))
"""Tasks whose objects may overlap; stand on a fixture; overlap the floor."""
ACTIONS = np.random.RandomState(0).uniform(-1, 1, (STEPS, 7))


def scene(task: LiberoTask, cameras: dict[str, str] = CAMERAS) -> Scene:
    return Scene(
        str(task.bddl), str(task.init_states), seed=0, cameras=cameras, size=SIZE, rendering="lazy"
    )


def seen(scene: Scene, episode: Episode) -> list[Any]:
    state = np.concatenate([[episode.data.time], episode.data.qpos, episode.data.qvel])
    return [
        *scene.proprioception(episode),
        state,
        *(image.copy() for image in scene.images(episode).values()),
    ]


def disturb(sim: Any, joint: str | None) -> None:
    """Turns a stove on, for example: its flame is not part of the physical state."""
    if joint is not None:
        sim.data.set_joint_qpos(joint, 1.0)


def ours(scene: Scene, number: int, joint: str | None = None) -> list[list[Any]]:
    scene.step(scene.begin(7, 0), ACTIONS[3])  # another episode before it
    episode = scene.begin(number, WAIT_STEPS)
    found = [seen(scene, episode)]
    for index, action in enumerate(ACTIONS):
        if index == 2:
            disturb(scene.at(episode).sim, joint)
        scene.step(episode, action)
        found.append(seen(scene, episode))
    return found


def stock(
    task: LiberoTask, number: int, joint: str | None, cameras: dict[str, str]
) -> list[list[Any]]:
    """As published: a hard reset, all observables, an image at every control step."""
    from libero.libero.envs.env_wrapper import ControlEnv

    np.random.seed(0)
    options = {
        "camera_names": list(cameras.values()),
        "camera_heights": SIZE,
        "camera_widths": SIZE,
        "ignore_done": True,
    }
    env = ControlEnv(
        bddl_file_name=str(task.bddl),
        use_camera_obs=bool(cameras),
        has_offscreen_renderer=bool(cameras),
        **options,
    )
    env.env.object_property_initializers.clear()
    env.seed(0)
    env.env.reset()
    observation = env.set_init_state(np.load(task.init_states)["states"][number])
    for _ in range(WAIT_STEPS):
        observation, *_ = env.step([0.0] * 6 + [-1.0])
    found = [of_stock(env, observation)]
    for index, action in enumerate(ACTIONS):
        if index == 2:
            disturb(env.sim, joint)
        observation, *_ = env.step(action)
        found.append(of_stock(env, observation))
    env.close()
    return found


def of_stock(env: Any, observation: dict[str, Any]) -> list[Any]:
    quaternion = np.roll(observation["robot0_eef_quat"], 1)
    images = [observation[name].copy() for name in observation if name.endswith("_image")]
    return [
        observation["robot0_eef_pos"],
        quaternion,
        observation["robot0_gripper_qpos"],
        env.get_sim_state(),
        *images,
    ]


def same(a: list[list[Any]], b: list[list[Any]]) -> bool:
    return all(
        np.array_equal(x, y)
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def against_stock() -> dict[str, bool]:
    """Tasks with a fixture; with a stove to turn on; and with a drawer that starts open, whose property robosuite draws again at each
    reset."""
    found = {}
    for suite, number, joint, renderings, cameras in (
        ("libero_spatial", 0, None, ("lazy", "exact"), CAMERAS),
        ("libero_goal", 7, "flat_stove_1_button", ("lazy",), CAMERAS),
        ("libero_10", 3, None, ("lazy",), {}),
    ):
        task = of_suite(suite)[number]
        expected = stock(task, 3, joint, cameras)
        here = scene(task, cameras=cameras)
        for rendering in renderings:
            here.exact = rendering == "exact"
            found[f"{task.name} {rendering}"] = same(ours(here, 3, joint), expected)
        here.close()
    return found


def mistakes() -> dict[str, bool]:
    """Whether numbers and pixels equal robosuite's with a known mistake; ``none``: without one."""
    task = of_suite("libero_spatial")[0]
    none = nullcontext()
    expected = stock(task, 3, None, CAMERAS)
    here = scene(task)
    gripper = here.env.robots[0].gripper
    reset = here.env.reset

    def remembering() -> None:
        gripper.current_action = np.ones(gripper.dof)
        reset()

    made: dict[str, Any] = {
        "none": none,
        "the gripper's command outlives a soft reset": patch.object(here.env, "reset", remembering),
        "fixtures drawn from another seed": patch.object(here, "seed", 7),
        "no waiting": patch.dict(globals(), {"WAIT_STEPS": 0}),
        "the gripper closes while waiting": patch.object(libero_scene, "WAIT", -libero_scene.WAIT),
        "a quarter of the control rate": patch.object(
            libero_scene, "SUBSTEPS", 4 * libero_scene.SUBSTEPS
        ),
        "observed at every substep": patch.object(SamplingClock, "tick", lambda clock: True),
    }
    found = {}
    for name, mistake in made.items():
        with mistake:
            found[name] = same(ours(here, 3), expected)
    # robosuite refuses its 1001st step, which two episodes of 520 steps after waiting would reach
    here.env.timestep = 5000
    here.env.done = True
    found["plays on"] = np.isfinite(ours(here, 3)[-1][0]).all().item()
    here.close()
    return found


def interleaved(one: Scene, other: Scene) -> bool:
    """Two episodes in one scene, and a second scene with its own OpenGL context, in turns, equal those of each alone."""
    expected = [ours(one, 1), ours(one, 2), ours(other, 1)]
    episodes = [
        (one, one.begin(1, WAIT_STEPS)),
        (one, one.begin(2, WAIT_STEPS)),
        (other, other.begin(1, WAIT_STEPS)),
    ]
    found = [[seen(*each)] for each in episodes]
    for action in ACTIONS:
        for where, episode in episodes:
            where.step(episode, action)
    for each, list_ in zip(episodes, found, strict=True):
        list_.append(seen(*each))
    return all(same(a, [b[0], b[-1]]) for a, b in zip(found, expected, strict=True))


def projected(here: Scene) -> dict[str, Any]:
    """Object -> its position in the image by geometry (row, column of an upright image), and the middle of the pixels that change when
    it is removed."""
    import mujoco

    episode = here.begin(0, WAIT_STEPS)
    env = here.at(episode)
    model = env.sim.model._model
    data = episode.seen
    camera = env.sim.model.camera_name2id("agentview")
    focal = SIZE / 2 / np.tan(np.deg2rad(model.cam_fovy[camera]) / 2)
    mujoco.mj_forward(model, data)
    before = here.images(episode)["base"][::-1].astype(int)
    found = {}
    for name, thing in env.objects_dict.items():
        x, y, z = data.cam_xmat[camera].reshape(3, 3).T @ (
            data.xpos[env.obj_body_id[name]] - data.cam_xpos[camera]
        )
        height = model.jnt_qposadr[env.sim.model.joint_name2id(thing.joints[-1])] + 2
        kept = data.qpos[height]
        data.qpos[height] = -5
        mujoco.mj_forward(model, data)
        changed = np.abs(here.images(episode)["base"][::-1] - before).sum(2) > 30
        data.qpos[height] = kept
        mujoco.mj_forward(model, data)
        found[name] = {
            "geometry": [SIZE / 2 - focal * y / -z, SIZE / 2 + focal * x / -z],
            "seen": np.argwhere(changed).mean(0).tolist(),
        }
    return found


def drawn(suite: str, number: int) -> dict[str, bool]:
    """Initial states that are drawn, against all 50 stored ones, each after waiting."""
    here = scene(of_suite(suite)[number], cameras={})
    fixtures = list(here.env.fixtures_dict)

    def positions(begun: Episode) -> dict[str, Any]:
        env = here.at(begun)
        return {
            name: env.sim.data.body_xpos[env.obj_body_id[name]].copy()
            for name in (*env.objects_dict, *env.fixtures_dict)
        }

    stored = [positions(here.begin(each, 10)) for each in range(50)]
    found = [positions(here.begin(1000 + each, 10, drawn=True)) for each in range(20)]
    ranges = {name: np.array([each[name] for each in stored]) for name in stored[0]}
    near = [
        np.all((p > ranges[name].min(0) - 0.04) & (p < ranges[name].max(0) + 0.04))
        for each in found
        for name, p in each.items()
    ]
    movable = [name for name in stored[0] if np.ptp(ranges[name], axis=0).max() > 0.005]
    nearest = [
        min(np.abs(each[name] - other[name]).max() for other in stored)
        for each in found
        for name in movable[:1]
    ]
    again = positions(here.begin(1000, 10, drawn=True))
    last = here.begin(1019, 10, drawn=True)
    for _ in range(10):
        here.step(last, libero_scene.WAIT)
    rests = all(
        np.allclose(value, found[19][name], atol=1e-3) for name, value in positions(last).items()
    )
    after = positions(here.begin(7, 10))
    here.close()
    return {
        "where stored states have them": bool(np.all(near)),
        "fixtures do not move": all(
            np.array_equal(each[name], stored[0][name]) for each in found for name in fixtures
        ),
        "no stored state": bool(min(nearest) > 0),
        "differ from each other": len({tuple(each[movable[0]]) for each in found}) == len(found),
        "depend on their seed only": all(
            np.array_equal(again[name], found[0][name]) for name in again
        ),
        "at rest": rests,
        "stored states are as before": all(
            np.array_equal(after[name], stored[7][name]) for name in after
        ),
    }


def random_state_is_untouched(here: Scene) -> bool:
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    here.begin(0, 0)
    return bool(np.array_equal(before, np.random.get_state()[1]))


def main() -> dict[str, Any]:
    import_libero()
    compared = against_stock()
    one, other = scene(of_suite("libero_spatial")[0]), scene(of_suite("libero_object")[0])
    return {
        "against_stock": compared,
        "mistakes": mistakes(),
        "interleaved": interleaved(one, other),
        "projected": projected(other),
        "random_state_is_untouched": random_state_is_untouched(one),
        "drawn": {f"{suite}-{number}": drawn(suite, number) for suite, number in DRAWN},
    }


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        facts = main()
    print(json.dumps(facts))
