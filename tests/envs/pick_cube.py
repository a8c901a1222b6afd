"""What the simulators of Genesis' scenes must do in PickCube and PutOnPlate, beside the conformance suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import torch
from torch import Tensor

from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.env import (
    EPISODE_LIMIT,
    NUM_ENVS,
    VectorEnvConformance,
    assert_same,
    episodes,
    random_actions,
)

PICK_CUBE = {
    "episode_limit": EPISODE_LIMIT,
    "control_mode": "ee_delta_pose",
    "reward": "progress",
    "image_size": 48,
}
"""Keys of the environment's config."""


class PickCubeConformance(VectorEnvConformance):
    """Subclasses make two groups with PICK_CUBE."""

    def test_a_killed_process_does_not_change_the_episodes(self, env: ProcessVectorEnv) -> None:
        """Its episodes have different ages, so that they are replayed one after the other."""
        actions = random_actions(env, 4, seed=10)
        results = []
        for kill in (False, True):
            env.reset(episodes(111, 112, 113))
            env.step(actions)
            env.reset(episodes(0, 114, 0), torch.tensor([False, True, False]))
            env.step_async(actions)
            if kill:
                os.kill(env.pool.pids[0], signal.SIGKILL)
            results.append(env.step_wait())
        assert_same(*results)
        assert env.pool.restarts == 1

    def test_the_tool_starts_at_the_position_of_the_scene(self, env: VectorEnv) -> None:
        state = env.reset(episodes(1, 2, 3)).state
        assert torch.allclose(
            state[:, :3], torch.tensor([0.45, 0.0, 0.3]).expand(NUM_ENVS, 3), atol=0.06
        )
        assert (state[:, 4].abs() > 0.99).all(), "it points down"
        assert torch.allclose(state[:, 7], torch.full((NUM_ENVS,), 0.04), atol=1e-3)

    def test_an_arm_without_actions_does_not_move(self, env: VectorEnv) -> None:
        before = env.reset(episodes(1, 2, 3)).state
        still = torch.zeros(NUM_ENVS, 10, 7)
        still[:, :, -1] = 1
        after = env.step(still).observation.state
        assert (after[:, :3] - before[:, :3]).abs().max() < 0.01

    def test_progress_adds_up_to_success(self, env: VectorEnv) -> None:
        env.reset(episodes(51, 51, 51))
        total = torch.zeros(NUM_ENVS)
        for _ in range(EPISODE_LIMIT):
            result = env.step(env.expert_actions()[:, None])
            total += result.reward.sum(1)
            if result.done.all():
                break
        assert result.success.any(1).all()
        assert (total > 0.8).all() and (total < 1).all(), total


def solved(env: VectorEnv, seeds: range, actions: Callable[[], Tensor]) -> float:
    """Share of the episodes that end in success."""
    number = env.spec.num_envs
    solved = 0
    for first in range(seeds.start, seeds.stop, number):
        env.reset(episodes(*range(first, first + number)))
        done = torch.zeros(number, dtype=torch.bool)
        for _ in range(env.spec.episode_limit):
            result = env.step(actions()[:, None])
            done |= result.success.any(1)
            over = result.done
            if over.any():  # start another episode there, so that the others can continue
                env.reset(episodes(*[9_000] * number), over)
            if done.all():
                break
        solved += int(done.sum())
    return solved / len(seeds)


class PutOnPlateTests:
    """A subclass's module has a fixture ``plates``: the environment."""

    def test_the_expert_succeeds_and_random_actions_fail(self, plates: VectorEnv) -> None:
        number = plates.spec.num_envs
        assert solved(plates, range(number), plates.expert_actions) >= 0.8
        generator = torch.Generator().manual_seed(0)
        assert (
            solved(plates, range(number), lambda: torch.randn(number, 4, generator=generator)) == 0
        )

    def test_the_instruction_names_the_cube(self, plates: VectorEnv) -> None:
        told = set(plates.reset(episodes(*range(plates.spec.num_envs))).instruction)
        assert told <= {
            f"put the {colour} cube on the plate" for colour in ("red", "green", "blue")
        }
        assert len(told) > 1
