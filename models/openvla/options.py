"""Recipe options of OpenVLA and OpenVLA-OFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from rlinf_vla.config.ranges import Label, Name, NonEmpty, Range, Size

from ..options import LLAMA_LINEARS, WeightOptions


@dataclass
class CommonOptions(WeightOptions):
    """Fields of ``model.options`` that OpenVLA and OpenVLA-OFT share."""

    # the modules that the official fine-tuning script ("all-linear") stores, less the output layer
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("q", "kv", "qkv", "proj", "fc1", "fc2", "fc3"),
        *LLAMA_LINEARS,
    )
    card: Name | None = None
    """Card of a published checkpoint, whose values null options take (docs/openvla.md). null: found
    by the repository's name; ``none``: no card."""
    prompt_length: Size | None = None
    """Token ids per prompt, padding included. null: 32, or more if an instruction of the
    environment needs more."""
    unnorm_key: Label | None = None
    """Dataset whose statistics un-normalise actions; needed only if the checkpoint has several."""
    center_crop: bool | None = None
    """Crop images to the middle 90 % of their area, as the official evaluation of models trained on
    random crops. null, here and below: as in config.json (ours), else as in the official
    evaluation."""
    resize: Name | None = None
    """Image resizing. ``processor``: as the checkpoint's processor. ``rlds``: JPEG and Lanczos, as
    the official fine-tuning data and LIBERO evaluation."""
    gripper: Name | None = None
    """Convention of the gripper action. ``raw``: as in the checkpoint, 0 closed to 1 open.
    ``open_positive``, ``close_positive`` (LIBERO): ±1 for an environment in which +1 opens or
    closes."""
    bounds: Name | None = None
    """Statistics by which actions and proprioception are scaled. ``q99``: 1 % and 99 % quantiles.
    ``min_max``: the official code's for ALOHA, which no file of a checkpoint says."""


@dataclass
class OpenVLAOptions(CommonOptions):
    """Recipe node ``model.options``."""

    image: Name | None = None
    """Camera of the environment that the policy sees; null: as the card says, else ``base``."""


@dataclass
class OpenVLAOFTOptions(CommonOptions):
    """Recipe node ``model.options``. null takes the value of config.json under ``oft`` (ours), else
    that of the official LIBERO checkpoints."""

    images: Annotated[list[Label], NonEmpty()] | None = None
    """Cameras of the environment that the policy sees, in training order (main one first); null: as
    the card says, else [base]."""
    head: Name | None = None
    """Action head. ``discrete``: action tokens with a distribution to sample from. ``l1``:
    deterministic regression (``action_head--*.pt``)."""
    chunk: Annotated[int, Range(1, 1024)] | None = None
    """Actions per policy call: 8 in the LIBERO checkpoints, 25 in ALOHA's, 5 in Bridge's."""
    proprio: bool | None = None
    """Read proprioception (``proprio_projector--*.pt``)."""
    film: bool | None = None
    """Modulate the vision towers by the instruction (FiLM, OFT+)."""
    stop_token: bool | None = None
    """End the sequence with ``</s>``, as the official code and SimpleVLA-RL do. RLinf's fine-tunes
    were trained without it."""
