"""Convert robot episodes to a LeRobotDataset, and recorded actions to a scene's expert."""

from __future__ import annotations

import numpy as np

from rlinf_vla.core.robot import Action, RobotState, Scene
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column
from rlinf_vla.realworld.episode import RobotEpisode


def robot_frames(episode: RobotEpisode) -> dict[str, Column]:
    """Return a frame per executed step, with every feature of ``recorded_features``.
    A truncated episode also gets its last observation, with an action that moves nothing."""
    rows = len(episode) + (not episode.terminated)
    last = np.arange(rows) == rows - 1
    action, reward = np.zeros((rows, episode.action.shape[1]), np.float32), np.zeros(rows, np.float32)
    action[: len(episode)], reward[: len(episode)] = episode.action, episode.reward
    action[len(episode) :, -1] = episode.action[-1, -1]  # the gripper
    found: dict[str, Column] = {form.STATE: episode.state[:rows].numpy(), form.ACTION: action, form.REWARD: reward}
    found |= {form.DONE: last, form.TRUNCATED: last & (not episode.terminated), form.SUCCESS: last & episode.success}
    return found | {form.IMAGES + name: images[:rows].numpy() for name, images in episode.images.items()}


class ReplayScene:
    """Implements ``Scene``: wrap ``scene`` with an expert that replays ``actions``.
    actions: float32 ``[N, D]``. Each episode starts with the first; after the last the expert
    returns None."""

    has_expert = True

    def __init__(self, scene: Scene, actions: Column) -> None:
        self._scene, self._actions, self._done = scene, actions, 0
        self.task, self.by_hand = scene.task, scene.by_hand

    def arrange(self, seed: int) -> str:
        self._done = 0
        return self._scene.arrange(seed)

    def succeeded(self, state: RobotState) -> bool | None:
        return self._scene.succeeded(state)

    def expert(self, state: RobotState) -> Action | None:
        if self._done == len(self._actions):
            return None
        self._done += 1
        action: Action = self._actions[self._done - 1]
        return action
