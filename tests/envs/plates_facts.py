"""Things to know about PutOnPlate25 that need a simulator in the asking process, or with ``experts`` how often the experts succeed.

Prints one JSON object; run by test_maniskill_facts.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from rlinf_vla.core.types import Episodes
from rlinf_vla.envs.maniskill.config import ManiSkillConfig
from rlinf_vla.envs.maniskill.plates_splits import MOVE_STEP, SPLITS
from rlinf_vla.envs.maniskill.plugin import simulator_options
from rlinf_vla.envs.maniskill.simulator import ManiSkillSimulator
from rlinf_vla.envs.maniskill.tasks import TASKS
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.vector_env import ProcessVectorEnv

NAMES = {entry.split: name for name, entry in TASKS.items() if entry.split}
SEED = 4


def simulator(split: str, **config: Any) -> ManiSkillSimulator:
    return ManiSkillSimulator(
        {
            **simulator_options(ManiSkillConfig(task=NAMES[split], **config)),
            "render_backend": "cpu",
        },
        1,
    )


def place(sim: ManiSkillSimulator) -> list[float]:
    """Of the instructed object: x, y, z in metres."""
    where: list[float] = sim.slots[0].env.of_target(lambda thing: thing.pose.p)[0].tolist()
    return where


def compared_with_main(
    split: str, main: ManiSkillSimulator, sim: ManiSkillSimulator
) -> dict[str, Any]:
    """What differs at the start of an episode of the same seed."""
    texts = [each.reset(0, SEED, 0) for each in (main, sim)]
    expected, seen = main.observe(0), sim.observe(0)
    one, other = expected.images["base"].astype(float), seen.images["base"].astype(float)
    noise = SPLITS[split].noise
    return {
        "text": texts[0] != texts[1],
        "state": expected.state.tobytes() != seen.state.tobytes(),
        "image": bool((one != other).any()),
        "changed": float((one != other).any(-1).mean()),
        "is_a_blend": bool(
            (np.abs(other - one * (1 - noise) - 127.5 * noise) <= 127.5 * noise + 0.51).all()
        ),
        "object": float(np.abs(np.subtract(place(main), place(sim))).max()),
    }


def repeats(sim: ManiSkillSimulator) -> bool:
    """Whether an episode has the same bits again, after another one."""
    seen = []
    for seed in (SEED, SEED + 1, SEED):
        sim.reset(0, seed, 0)
        for _ in range(8):
            sim.step(0, sim.expert(0))
        seen.append(sim.observe(0).state.tobytes() + sim.observe(0).images["base"].tobytes())
    return seen[0] == seen[2] != seen[1]


def expert(sim: ManiSkillSimulator, episodes: int) -> tuple[float, list[float]]:
    """Share of episodes that the expert solves, and the rewards of the last one that are not 0."""
    solved = 0
    rewards = []
    for seed in range(episodes):
        sim.reset(0, seed, 0)
        rewards = []
        for _ in range(TASKS["PutOnPlate25"].limit):
            step = sim.step(0, sim.expert(0))
            rewards.append(step.reward)
            if step.terminated:
                solved += step.success
                break
    return solved / episodes, [reward for reward in rewards if reward]


def moves(sim: ManiSkillSimulator) -> dict[str, Any]:
    """Distances (m) of the object from its first place after each step, and from the place where it should be in the end."""
    sim.reset(0, SEED, 0)
    first = place(sim)
    should = sim.slots[0].env.episodes[0].third_place
    distances = []
    for _ in range(MOVE_STEP + 2):
        sim.step(0, np.array([0, 0, 0.5, 1], np.float32))
        distances.append(float(np.linalg.norm(np.subtract(place(sim), first))))
    return {
        "distances": distances,
        "from_the_end": float(np.linalg.norm(np.subtract(place(sim)[:2], should))),
    }


def a_batch_of_one_is_the_cpu_backend(split: str, sim: ManiSkillSimulator) -> bool:
    """With the things that an episode does not show still where earlier episodes left them."""
    actions = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0)) * 0.5
    config = ManiSkillConfig(task=NAMES[split], reward="progress")
    options = {**simulator_options(config), "sim_backend": "physx_cpu", "render_backend": "cpu"}
    pool = SimulatorPool(
        ["-m", "rlinf_vla.envs.maniskill.batch"], options, slots=1, processes=1, episode_limit=9
    )
    env = ProcessVectorEnv(pool, (NAMES[split],))
    result = [
        env.reset(Episodes.first_attempts(torch.zeros(1).long(), torch.tensor([seed])))
        for seed in (3, SEED)
    ] and env.step(actions)
    env.close()
    instruction = sim.reset(0, SEED, 0)
    for action in actions[0]:
        sim.step(0, action.numpy())
    seen = sim.observe(0)
    return (
        torch.equal(result.observation.state[0], torch.from_numpy(seen.state))
        and torch.equal(result.observation.images["base"][0], torch.from_numpy(seen.images["base"]))
        and result.observation.instruction == [instruction]
    )


def experts() -> dict[str, Any]:
    found: dict[str, Any] = {"in_training": expert(simulator("main", reward="progress"), 6)}
    return found | {"splits": {name: expert(simulator(name), 2)[0] for name in SPLITS}}


def facts() -> dict[str, Any]:
    main = simulator("main", reward="progress")
    found: dict[str, Any] = {"repeats": repeats(main), "splits": {}}
    for name in SPLITS:
        sim = simulator(name)
        found["splits"][name] = compared_with_main(name, main, sim)
        if name == "moved_object":
            found["moves"] = moves(sim)
            found["a_batch_of_one_is_the_cpu_backend"] = a_batch_of_one_is_the_cpu_backend(
                name, sim
            )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(experts() if "experts" in sys.argv else facts()))
