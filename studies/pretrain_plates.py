"""Pretrain a tiny OpenVLA-OFT for PutOnPlate25, before it imitates whole episodes.

``python studies/pretrain_plates.py CHECKPOINT DIRECTORY`` reads the configuration of CHECKPOINT,
begins with random weights and writes a checkpoint. It draws scenes of the training split, in every
second one of which the arm is somewhere else, and trains twice:

1. the vision towers to find the patches that hold the object and the receptacle,
2. the whole policy to act as the expert does in these scenes.

A real VLA has such towers from its pretraining. Imitation of whole episodes teaches a tiny one
neither: the arm's position reveals where the expert moves (docs/results/putonplate25.md).
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_vla.core.types import Observation
from rlinf_vla.envs.maniskill.config import ManiSkillConfig
from rlinf_vla.envs.maniskill.plugin import cpu_driver, simulator_options
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions

FIRST_SEED = 10_000_000
"""Of scenes; evaluations and demonstrations take others."""
JOINTS = np.array([0.25, 0.2, 0.1, 0.2, 0.1, 0.1, 0.1])
"""Standard deviations (rad) of the arm's joints where it is somewhere else."""
HEIGHTS = (0.02, 0.005)
"""Of the middle of object and receptacle above the table, metres, about."""
PROMPT_LENGTH = 40
BATCH = 128
RATE = 1e-3
WARMUP = 50


@dataclass
class Scenes:
    """``N`` scenes: what the policy sees, the pixels (u, v) ``[N, 2, 2]`` of object and receptacle,
    and the expert's actions ``[N, D]``."""

    seen: Observation
    pixels: Tensor
    actions: Tensor


def draw_scenes(count: int, config: ManiSkillConfig, render_backend: str) -> Scenes:
    from rlinf_vla.envs.maniskill import fast_paths
    from rlinf_vla.envs.maniskill.lowpoly import low_poly_visuals
    from rlinf_vla.envs.maniskill.simulator import ManiSkillEnv

    fast_paths.install()
    rng = np.random.default_rng(FIRST_SEED)
    images = []
    states = []
    instructions = []
    pixels = []
    actions = []
    with low_poly_visuals():
        simulator = ManiSkillEnv(simulator_options(config), 1, "physx_cpu", render_backend)
    env = simulator.env
    for number in range(count):
        env.reset(seed=FIRST_SEED + number)
        if number % 2:
            joints = env.agent.robot.get_qpos().numpy().copy()
            joints[:, : len(JOINTS)] += rng.normal(0.0, JOINTS)
            env.agent.robot.set_qpos(torch.from_numpy(joints).float())
        state, image = simulator.observe([0])
        images.append(image["base"][0])
        states.append(state[0])
        instructions += simulator.begun([0])
        episode = env.episodes[0]
        places = np.stack([episode.object_place, episode.receptacle_place])
        camera = env.scene.sensors[simulator.options["camera"]].get_params()
        pixels.append(
            projected(np.concatenate([places, np.array(HEIGHTS)[:, None]], axis=1), camera)
        )
        actions.append(simulator.expert()[0])
    env.close()
    return Scenes(
        Observation({"base": torch.stack(images)}, torch.stack(states), instructions),
        torch.stack(pixels),
        torch.stack(actions),
    )


def projected(places: NDArray[np.float64], camera: dict[str, Tensor]) -> Tensor:
    """Return the pixels ``[N, 2]`` (u, v) of ``places`` ``[N, 3]`` in metres."""
    points = torch.tensor(
        np.concatenate([places, np.ones((len(places), 1))], axis=1), dtype=torch.float32
    )
    seen = camera["intrinsic_cv"][0] @ camera["extrinsic_cv"][0] @ points.T
    return (seen[:2] / seen[2]).T


def train(
    name: str,
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    count: int,
    steps: int,
) -> None:
    """Minimise ``loss_of`` random rows out of ``count``, by AdamW with a warm-up and a cosine."""
    weights = list(parameters)
    optimizer = torch.optim.AdamW(weights, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                RATE
                * min(1.0, (step + 1) / WARMUP)
                * (0.525 + 0.475 * math.cos(math.pi * step / steps))
            )
        loss = loss_of(torch.randint(count, (BATCH,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 50 == 49:
            print(f"{name}: step {step + 1}/{steps}, loss {loss.item():.3f}", flush=True)


def pretrain(policy: OpenVLAOFTPolicy, scenes: Scenes, tower_steps: int, steps: int) -> None:
    inputs = policy.prepare(scenes.seen)
    count = len(scenes.actions)
    size = policy.config["vision_config"]["featurizer"]["patch_size"]
    side = policy.config["image_sizes"][0]
    columns, rows = (scenes.pixels / size).floor().clamp(0, side // size - 1).long().unbind(dim=-1)
    patches = rows * (side // size) + columns
    head = nn.Linear(policy.backbone.projector.fc1.in_features, patches.shape[1])
    chunks = scenes.actions[:, None].expand(-1, policy.spec.chunk, -1)

    def of(chosen: Tensor) -> dict[str, Any]:
        return {name: value[chosen] for name, value in inputs.items()}

    def search(chosen: Tensor) -> Tensor:
        return F.cross_entropy(head(policy.patches(of(chosen))), patches[chosen])

    def imitate(chosen: Tensor) -> Tensor:
        no_noise: Any = None
        return policy.supervised_loss(of(chosen), chunks[chosen], no_noise).mean()

    train(
        "towers",
        [*policy.backbone.vision_backbone.parameters(), *head.parameters()],
        search,
        count,
        tower_steps,
    )
    train("policy", policy.backbone.parameters(), imitate, count, steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="config.json, tokenizer and statistics; its weights are not read",
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--scenes", type=int, default=16_000)
    parser.add_argument("--tower-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    config = ManiSkillConfig(task="PutOnPlate25")
    render_backend, variables = cpu_driver(config)
    if any(
        os.environ.get(name) != value for name, value in variables.items()
    ):  # the Vulkan loader reads them when a process starts
        sys.exit(
            subprocess.run(
                [sys.executable, *sys.argv], env=os.environ | variables, check=False
            ).returncode
        )
    torch.manual_seed(0)
    policy = OpenVLAOFTPolicy(
        arguments.checkpoint, OpenVLAOFTOptions(random_weights=True, prompt_length=PROMPT_LENGTH)
    )
    pretrain(
        policy,
        draw_scenes(arguments.scenes, config, render_backend),
        arguments.tower_steps,
        arguments.steps,
    )
    arguments.directory.mkdir(parents=True, exist_ok=True)
    policy.save(arguments.directory, torch.float32)


if __name__ == "__main__":
    main()
