"""A gymnasium environment that starts at once: a point to move to the middle, shown in a small image."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray


class Tiny(gymnasium.Env[Any, Any]):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, truncates: bool = False, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._truncates = truncates
        self.action_space = Box(-2.0, 2.0, (2,), np.float32)
        self.observation_space = Dict(
            {
                "rgb": Box(0, 255, (6, 8, 3), np.uint8),
                "position": Box(-9, 9, (2,), np.float32),
                "depth": Box(0, 1, (6, 8), np.float32),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._position = self.np_random.uniform(-3, 3, 2).astype(np.float32)
        return self._see(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._position = self._position + 0.1 * action
        there = bool(np.abs(self._position).max() < 0.1)
        return (
            self._see(),
            -float(np.abs(self._position).sum()),
            there,
            self._truncates,
            {"is_success": there},
        )

    def render(self) -> Any:
        return np.full((4, 4, 3), 7, np.uint8)

    def _see(self) -> dict[str, Any]:
        shade = (np.abs(self._position) * 20).astype(np.uint8)
        image = np.broadcast_to(np.append(shade, 0), (6, 8, 3)).astype(np.uint8)
        return {"rgb": image, "position": self._position, "depth": np.zeros((6, 8), np.float32)}


gymnasium.register("Tiny-v0", Tiny, max_episode_steps=5)
