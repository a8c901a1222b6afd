"""Record a scripted expert's episodes for a LeRobotDataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from rlinf_vla.algorithms.sft import DemonstrationConfig
from rlinf_vla.core.protocols import EnvSpec, VectorEnv
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Column, Feature
from rlinf_vla.rollout.demonstrations import LABEL, play_expert
from rlinf_vla.rollout.player import Call
from rlinf_vla.rollout.scripted_actors import Unprepared

EXPERT_ACTION = "expert_action"
"""Feature of the expert's noise-free action; ``action`` is the executed one.
LeRobot's policies learn features whose name begins with ``action``, so this one does not."""


@dataclass
class Played:
    """One episode. frames: every feature of :func:`expert_features` ``[L, *shape]``."""

    frames: dict[str, Column] = field(default_factory=dict)
    instruction: str = ""
    success: bool = False


def expert_features(spec: EnvSpec, video: bool) -> dict[str, Feature]:
    """Return the dataset's features; ``video``: store cameras as video instead of images."""
    return form.recorded_features(spec, video, {EXPERT_ACTION: Feature("float32", (spec.action_dim,))})


def play_for_dataset(groups: Sequence[VectorEnv], config: DemonstrationConfig, run_seed: int, finished: Callable[[Played], None]) -> None:
    """Run the episodes of :func:`demonstrate`, same noise; ``finished`` gets them by seed."""
    under_way: dict[int, dict[str, list[Column]]] = defaultdict(lambda: defaultdict(list))
    waiting: dict[int, Played] = {}
    following = 0

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        nonlocal following
        rows = _frame(call)
        for slot, number in enumerate(index.tolist()):
            if number < 0:
                continue
            episode = under_way[number]
            for key, values in rows.items():
                episode[key].append(values[slot])
            if call.result.done[slot]:
                frames = {key: np.stack(values) for key, values in under_way.pop(number).items()}
                waiting[number] = Played(frames, call.observation.instruction[slot], bool(frames[form.SUCCESS][-1]))
        while following in waiting:
            finished(waiting.pop(following))
            following += 1

    play_expert(Unprepared(), groups, config, run_seed, on_call)


def _frame(call: Call) -> dict[str, Column]:
    """Return the frame of each environment, ``[B, *shape]``: observation, action and outcome."""
    result = call.result
    values = {
        form.STATE: call.observation.state,
        form.ACTION: call.sample.actions[:, 0],
        EXPERT_ACTION: call.sample.latent[LABEL],
        form.REWARD: result.reward[:, 0],
        form.DONE: result.done,
        form.TRUNCATED: (result.truncated & ~result.terminated)[:, 0],  # reaching the goal at the time limit is no truncation
        form.SUCCESS: result.success[:, 0],
    }
    values |= {form.IMAGES + name: images for name, images in call.observation.images.items()}
    # copy: simulators may reuse the memory for the next observation
    return {key: value.cpu().numpy().copy() for key, value in values.items()}
