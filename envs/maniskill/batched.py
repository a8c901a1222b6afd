"""The gpu backend: all environments are one batch, stepped together in this process, and no tensor leaves the device.

The chunk logic is :class:`BatchedVectorEnv`; what it asks of a simulator is :class:`Batch`. Tested without a GPU: the first on a toy batch,
``ManiSkillBatch`` as a batch of one on the CPU, where it equals the cpu backend bit for bit. Unproven: ``physx_cuda`` itself, its speed and
its memory. GPU trajectories differ from CPU ones, and PhysX does not promise that they repeat bit for bit.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_vla.protocols import EnvSpec, ToolUnits, VectorEnv
from rlinf_vla.types import Episodes, Observation, StepResult, UserError

from ..checks import checked_actions, checked_episodes
from .experts import expert_actions
from .lowpoly import low_poly_visuals
from .simulator import Outcome, make, proprioception, rotation_signs, stack, tool_units


class Batch(Protocol):
    """``N`` environments that can be reset one by one but only stepped together. All tensors lie on ``device``."""

    num_envs: int
    action_dim: int
    state_dim: int
    control_hz: float
    image_size: tuple[int, int]
    device: torch.device
    tool: ToolUnits | None
    stack: dict[str, str]

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        """Reset ``rows``; ``seeds`` of all ``N``. An episode depends on its own seed only. Returns the ``N`` present instructions."""

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One control step of all, ``actions`` ``[N, D]``: reward float32, terminated and success bool ``[N]``."""

    def observe(self) -> tuple[Tensor, Tensor]:
        """State float32 ``[N, S]`` and image uint8 ``[N, H, W, 3]``, not to be written again by the simulator."""

    def expert(self) -> Tensor:
        """float32 ``[N, D]``"""

    def render(self, index: int) -> Tensor:
        """uint8 ``[H, W, 3]``"""

    def close(self) -> None: ...


class BatchedVectorEnv(VectorEnv):
    """A :class:`Batch` as a vector environment.

    A batch cannot hold single environments still. One that ends inside a chunk therefore moves on until the chunk is over, unseen: what it
    saw at its end is kept and returned, its later steps are not valid, and it cannot be stepped again before it is reset.
    """

    def __init__(self, batch: Batch, episode_limit: int, tasks: tuple[str, ...], no_expert: str | None = None) -> None:
        self._batch, self._no_expert, self._closed = batch, no_expert, False
        n, device = batch.num_envs, batch.device
        self.spec = EnvSpec(
            num_envs=n,
            action_dim=batch.action_dim,
            state_dim=batch.state_dim,
            control_hz=batch.control_hz,
            episode_limit=episode_limit,
            images={"base": batch.image_size},
            tasks=tasks,
            device=device,
            tool=batch.tool,
            stack=batch.stack,
        )
        self._seeds = [0] * n
        self._executed = torch.zeros(n, dtype=torch.int64, device=device)
        self._under_way = torch.zeros(n, dtype=torch.bool, device=device)
        self._state = torch.zeros(n, batch.state_dim, device=device)
        self._image = torch.zeros(n, *batch.image_size, 3, dtype=torch.uint8, device=device)
        self._instruction = [""] * n
        self._result: StepResult | None = None

    def reset_async(self, episodes: Episodes, mask: Tensor | None = None) -> None:
        if self._closed:
            raise RuntimeError("the vector environment is closed")
        rows = checked_episodes(self.spec, episodes, mask)
        seeds = episodes.seed.tolist()
        for row in rows:
            self._seeds[row] = seeds[row]
        self._instruction = self._batch.reset(list(self._seeds), rows)
        chosen = torch.zeros_like(self._under_way)
        chosen[rows] = True
        self._executed[chosen] = 0
        self._under_way |= chosen
        self._look(chosen)

    def reset_wait(self) -> Observation:
        return self._observation()

    def step_async(self, actions: Tensor) -> None:
        actions = checked_actions(self.spec, actions)
        if not self._under_way.all():
            raise RuntimeError(f"environment {int((~self._under_way).nonzero()[0])} has no episode under way: reset it first")
        shape = (self.spec.num_envs, actions.shape[1])
        reward = torch.zeros(shape, device=self.spec.device)
        terminated, truncated, success, valid = (torch.zeros(shape, dtype=torch.bool, device=self.spec.device) for _ in range(4))
        unseen = self._under_way.clone()
        for c in range(actions.shape[1]):
            alive = self._under_way.clone()
            earned, fell, reached = self._batch.step(actions[:, c])
            self._executed += alive
            valid[:, c] = alive
            reward[:, c] = torch.where(alive, earned, 0.0)
            success[:, c] = reached & alive
            terminated[:, c] = fell & alive
            truncated[:, c] = alive & ~fell & (self._executed >= self.spec.episode_limit)
            ended = terminated[:, c] | truncated[:, c]
            self._under_way &= ~ended
            if ended.any():
                self._look(ended)
                unseen &= ~ended
            if not self._under_way.any():
                break
        if unseen.any():
            self._look(unseen)
        self._result = StepResult(self._observation(), reward, terminated, truncated, success, valid)

    def step_wait(self) -> StepResult:
        if self._result is None:
            raise RuntimeError("step_wait without step_async")
        result, self._result = self._result, None
        return result

    def render(self, index: int) -> Tensor:
        return self._batch.render(index)

    def expert_actions(self) -> Tensor:
        if self._no_expert is not None:
            raise UserError(self._no_expert)
        return self._batch.expert()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._batch.close()

    def _look(self, rows: Tensor) -> None:
        """Take what the environments in ``rows`` (bool ``[N]``) see now as their present observation."""
        state, image = self._batch.observe()
        self._state = torch.where(rows[:, None], state, self._state)
        self._image = torch.where(rows[:, None, None, None], image, self._image)

    def _observation(self) -> Observation:
        return Observation({"base": self._image}, self._state, list(self._instruction))


class ManiSkillBatch:
    """One ManiSkill base environment as a :class:`Batch`."""

    def __init__(self, options: dict[str, Any], num_envs: int, sim_backend: str, render_backend: str) -> None:
        with ExitStack() as visuals:
            if options["low_poly"]:
                visuals.enter_context(low_poly_visuals())
            self._env = make(options, num_envs, sim_backend, render_backend)
        self._options, self._outcome = options, Outcome(self._env, options)
        self.num_envs, self.device = num_envs, torch.device(self._env.device)
        self._signs = torch.from_numpy(rotation_signs(self._env)).to(self.device)
        self.action_dim, self.state_dim, self.control_hz = len(self._signs), 8, float(self._env.control_freq)
        self.image_size = (options["image_size"], options["image_size"])
        units = tool_units(self._env)
        self.tool = None if units is None else ToolUnits(*units)
        self.stack = stack(self._env)
        self._initialize, self._env._initialize_episode = self._env._initialize_episode, self._initialize_one_by_one

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        self._env.reset(seed=seeds, options={"env_idx": torch.tensor(rows, device=self.device)})
        self._outcome.begin(rows)
        if hasattr(self._env, "get_language_instruction"):
            return [str(text) for text in self._env.get_language_instruction()]
        return [self._options["instruction"]] * self.num_envs

    def _initialize_one_by_one(self, rows: Tensor, options: dict[str, Any]) -> None:
        """ManiSkill draws the layouts of all rows from the seed of environment 0. An episode must depend on its own seed alone, so each row
        is initialised by itself, with its own generators."""
        env = self._env
        for row in rows.tolist():
            torch.manual_seed(int(env._episode_seed[row]))  # ManiSkill restores the global generator after the reset
            env._episode_rng = env._batched_episode_rng[row]
            env.scene._reset_mask = torch.zeros_like(env.scene._reset_mask)
            env.scene._reset_mask[row] = True
            self._initialize(torch.tensor([row], device=self.device), options)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, reward, terminated, _, info = self._env.step(actions * self._signs)
        reward, success = self._outcome(reward, info)
        return reward, terminated, success

    def observe(self) -> tuple[Tensor, Tensor]:
        image = self._env._get_obs_sensor_data()[self._options["camera"]]["rgb"]
        return proprioception(self._env), image.to(self.device, copy=True)  # the renderer writes into the same buffer again

    def expert(self) -> Tensor:
        return expert_actions(self._env)

    def render(self, index: int) -> Tensor:
        picture: Tensor = self._env.render()[index].cpu()
        return picture

    def close(self) -> None:
        self._env.close()
