"""Collect frames labelled with success, from the scripted expert under noise or a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_vla.algorithms.classifier import Frames
from rlinf_vla.algorithms.sft import DemonstrationConfig
from rlinf_vla.core.protocols import RewardModel, VectorEnv
from rlinf_vla.core.types import Inputs
from rlinf_vla.data.from_dataset import dataset_frames
from rlinf_vla.rollout.demonstrations import play_expert
from rlinf_vla.rollout.player import Call


@torch.no_grad()
def labelled_frames(
    model: RewardModel,
    groups: Sequence[VectorEnv],
    config: DemonstrationConfig,
    run_seed: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Frames:
    """Return the observation after every step of the demonstrations, labelled by success.

    Raises UserError if ``config.dataset`` is unreadable, does not fit the model or lacks success.
    """
    if config.dataset is not None:
        return dataset_frames(model, config, progress)
    inputs: list[list[Inputs]] = [[] for _ in range(config.episodes)]
    success: list[list[Tensor]] = [[] for _ in inputs]
    ended = 0

    def on_call(env: VectorEnv, call: Call, index: Tensor) -> None:
        nonlocal ended
        seen = model.prepare(call.result.observation)
        for slot, number in enumerate(index.tolist()):
            if number >= 0:
                inputs[number].append({name: value[slot].clone() for name, value in seen.items()})
                success[number].append(call.result.success[slot].any())
                ended += bool(call.result.done[slot])
        progress(ended / config.episodes)

    play_expert(model, groups, config, run_seed, on_call)
    rows = [row for episode in inputs for row in episode]
    return Frames(
        {name: torch.stack([row[name] for row in rows]) for name in rows[0]},
        torch.stack([each for episode in success for each in episode]),
        torch.cat([torch.full((len(episode),), number) for number, episode in enumerate(success)]),
    )
