"""Simulator process of gymnasium: one vector environment, stepped as a batch on the CPU."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_vla.config.errors import UserError

from ..batch_serving import BatchServer
from ..options import one_of
from ..serving import serve
from ..shared_arrays import SimulatorSpec

RENDERED = "@render"
BLANK = (64, 64)
"""(height, width) of the image of an environment that renders none."""


class GymnasiumBatch:
    """Implements ``Batch``. ``options``: the fields of ``GymnasiumConfig``.

    gymnasium forbids to step an episode that is over, but a batch steps all. An environment whose
    episode is over and that is not reset yet is therefore reset with seed 0; its steps are
    discarded. Raises UserError for options that do not fit the environment.
    """

    def __init__(self, options: dict[str, Any], num_envs: int) -> None:
        torch.set_num_threads(1)
        self._options = options
        self._env = _make(options, num_envs)
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        space = self._env.single_action_space
        if not hasattr(space, "low") or len(space.shape) != 1:
            raise UserError(
                f"env.id={options['id']} has actions {space}: only continuous vectors (Box) are supported"
            )
        self._low = space.low.astype(np.float64)
        self._high = space.high.astype(np.float64)
        if options["scale_actions"] and not np.isfinite([self._low, self._high]).all():
            raise UserError(
                f"env.id={options['id']} has actions without bounds: set env.scale_actions=false"
            )
        self._over = np.zeros(num_envs, bool)
        self._seen, _ = self._env.reset(seed=[0] * num_envs)
        self._check_keys()
        state, images = self.observe([0])
        self.spec = SimulatorSpec(
            action_dim=int(space.shape[0]),
            state_dim=state.shape[1],
            control_hz=float(options["control_hz"]),
            images={name: list(image.shape[1:3]) for name, image in images.items()},
            picture=list(self.render(0).shape[:2]),
            stack={name: version(name) for name in ("gymnasium", "numpy")},
        )

    def reset(self, seeds: list[int], rows: list[int]) -> list[str]:
        self._reset(seeds, np.isin(np.arange(self.num_envs), rows))
        return [self._options["instruction"]] * self.num_envs

    def step(self, actions: Tensor) -> tuple[Tensor, ...]:
        if self._over.any():
            self._reset([0] * self.num_envs, self._over.copy())
        action = actions.numpy().astype(np.float64)
        if self._options["scale_actions"]:
            action = self._low + (self._high - self._low) * (np.clip(action, -1, 1) + 1) / 2
        action = np.clip(action, self._low, self._high).astype(self._env.single_action_space.dtype)
        self._seen, reward, terminated, truncated, info = self._env.step(action)
        key = self._options["success"]
        success = (
            np.asarray(info.get(key, np.zeros(self.num_envs)), dtype=bool)
            if key
            else np.zeros(self.num_envs, bool)
        )
        fell, cut = (np.asarray(flags, bool) for flags in (terminated, truncated))
        self._over = fell | cut
        return tuple(
            torch.from_numpy(array)
            for array in (np.asarray(reward, np.float32), fell | success, success, cut)
        )

    def observe(self, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        keys = self._options["state"]
        parts = (
            [self._seen[key] for key in keys]
            if keys
            else []
            if isinstance(self._seen, dict)
            else [self._seen]
        )
        flat = [np.asarray(part, np.float32).reshape(self.num_envs, -1) for part in parts]
        state = np.concatenate([np.zeros((self.num_envs, 0), np.float32), *flat], axis=1)
        images = {
            name: torch.from_numpy(self._image(name, key)[rows].copy())
            for name, key in self._options["images"].items()
        }
        return torch.from_numpy(state[rows]), images

    def expert(self) -> Tensor:
        raise UserError("env=gymnasium has no scripted expert")

    def render(self, index: int) -> Tensor:
        if self._options["render"]:
            return torch.from_numpy(self._frames()[index].copy())
        for name, key in self._options["images"].items():
            return torch.from_numpy(self._image(name, key)[index].copy())
        return torch.zeros(*BLANK, 3, dtype=torch.uint8)

    def close(self) -> None:
        self._env.close()

    def _reset(self, seeds: list[int], mask: NDArray[np.bool_]) -> None:
        self._seen, _ = self._env.reset(seed=list(seeds), options={"reset_mask": mask.copy()})
        self._over &= ~mask

    def _image(self, name: str, key: str) -> NDArray[np.uint8]:
        """``[N, H, W, 3]``"""
        image = self._frames() if key == RENDERED else np.asarray(self._seen[key])
        if image.dtype != np.uint8 or image.ndim != 4 or image.shape[3] != 3:
            raise UserError(
                f"env.images.{name}={key} is {image.dtype} {list(image.shape[1:])}, not uint8 [height, width, 3]"
            )
        return image

    def _frames(self) -> NDArray[np.uint8]:
        return np.stack([np.asarray(frame) for frame in self._env.render()])

    def _check_keys(self) -> None:
        options = self._options
        mapping = isinstance(self._seen, dict)
        named = [(f"env.images.{name}", key) for name, key in options["images"].items()]
        for name, key in [*named, *(("env.state", key) for key in options["state"])]:
            if key == RENDERED and name.startswith("env.images"):
                if not options["render"]:
                    raise UserError(f"{name}={RENDERED} needs env.render=true")
            elif not mapping:
                raise UserError(
                    f"{name}={key}: the observation of env.id={options['id']} is one array, without keys"
                )
            else:
                one_of(key, self._seen, name)
        if mapping and not options["state"] and not options["images"]:
            raise UserError(
                f"env.id={options['id']} observes {', '.join(self._seen)}: name some of it in env.state or env.images"
            )


def _make(options: dict[str, Any], num_envs: int) -> Any:
    import gymnasium
    from gymnasium.vector import AutoresetMode

    single = options["vectorization"] != "vector_entry_point"
    kwargs = {**options["kwargs"], **({"render_mode": "rgb_array"} if options["render"] else {})}
    if single:
        kwargs |= {
            "max_episode_steps": -1,
            "vector_kwargs": {"autoreset_mode": AutoresetMode.DISABLED},
        }
    try:
        env = gymnasium.make_vec(
            options["id"], num_envs=num_envs, vectorization_mode=options["vectorization"], **kwargs
        )
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
        raise UserError(
            f"env.id={options['id']} cannot be made: {' '.join(str(error).split())}"
        ) from error
    if env.metadata.get("autoreset_mode") != AutoresetMode.DISABLED:
        raise UserError(
            f"env.id={options['id']} resets environments itself: its autoreset mode must be DISABLED"
        )
    return env


if __name__ == "__main__":
    serve(GymnasiumBatch, BatchServer)
