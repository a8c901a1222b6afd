"""Prints what Meta-World itself does, for test_metaworld.py; runs where it is installed, and imports nothing of this package.

Usage: metaworld_facts.py [--images SIZE] TASK ...
"""

import json
import pickle
import sys
import warnings

import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP
from metaworld.types import Task

SEED = 5
STEPS = 60


def begun(task, **options):
    """Made as LeRobot makes it, but with a seed and with the goal in its observation."""
    env = ALL_V3_ENVIRONMENTS[task](**options)
    data = {"rand_vec": np.zeros(6), "env_cls": type(env), "partially_observable": False}
    env.set_task(Task(env_name=task, data=pickle.dumps(data)))
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env.seed(SEED)
    return env, env.reset()[0]


def facts(task):
    env, observation = begun(task)
    found = {"start": observation.tolist(), "actions": [], "rewards": [], "successes": []}
    for _ in range(STEPS):
        action = np.clip(ENV_POLICY_MAP[task]().get_action(observation), -1, 1).astype(np.float32)
        observation, reward, _, _, info = env.step(action)
        found["actions"].append(action.tolist())
        found["rewards"].append(float(reward))
        found["successes"].append(bool(info["success"]))
    return found | {"end": observation.tolist()}


def image(task, size, camera, position=None):
    env, _ = begun(task, render_mode="rgb_array", camera_name=camera, width=size, height=size)
    if position is not None:
        env.model.camera(camera).pos = position
        mujoco.mj_forward(env.model, env.data)
    return np.ascontiguousarray(env.render())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    arguments = sys.argv[1:]
    if arguments[0] == "--images":
        size = int(arguments[1])
        task = arguments[2]
        moved = image(task, size, "corner2", [0.75, 0.075, 0.7])  # where LeRobot has it
        for seen in (moved, image(task, size, "corner2"), image(task, size, "topview")):
            sys.stdout.buffer.write(seen.tobytes())
    else:
        print(json.dumps({task: facts(task) for task in arguments}))
