"""SmolVLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.core.types import Inputs

from .. import files
from ..cards import Card
from ..config_keys import check_keys
from ..flow_network import Prefix
from ..lerobot import (
    check_cameras,
    check_dimensions,
    has_processors,
    processor_remarks,
    read_statistics,
)
from ..normalizer import Normalizer
from ..prompted_flow_policy import PromptedFlowPolicy
from . import checkpoint as layout
from .network import SmolVLANetwork
from .options import SmolVLAOptions


class SmolVLAPolicy(PromptedFlowPolicy):
    """SmolVLA. Its state is a token of the language model, so that ``frozen_vlm`` still trains its
    projection, through the frozen layers, as lerobot does."""

    name: ClassVar[str] = "smolvla"
    Config: ClassVar[type] = SmolVLAOptions
    built_from: ClassVar[tuple[str, ...]] = (files.CONFIG, layout.VLM_CONFIG, files.TOKENIZER)
    cards: ClassVar[Sequence[Card]] = ()
    bars: ClassVar[float | None] = 1.0
    lora_targets: ClassVar[tuple[str, ...]] = SmolVLAOptions.lora_targets
    vision_modules: ClassVar[tuple[str, ...]] = ("vlm_with_expert.vlm.model.vision_model",)
    language_modules: ClassVar[tuple[str, ...]] = ("vlm_with_expert.vlm.model.text_model",)
    projections: ClassVar[tuple[str, ...]] = (
        "action_in_proj",
        "action_out_proj",
        "action_time_mlp_in",
        "action_time_mlp_out",
    )
    full_modules: ClassVar[tuple[str, ...]] = ("state_proj", *projections)
    float32_weights: ClassVar[tuple[str, ...]] = full_modules
    """What lerobot does not cast."""
    split_unsupported: ClassVar[str | None] = None
    head_modules: tuple[str, ...] = ("vlm_with_expert.lm_expert", *projections)

    def __init__(self, directory: Path, options: SmolVLAOptions) -> None:
        super().__init__(directory, options)
        document = self.document = layout.read_document(directory)
        self.take_card({})
        self.remarks += check_keys(document, layout.TABLE, directory / files.CONFIG)
        self.remarks += processor_remarks(directory, relative=False)
        check_cameras(directory, document, options.images)
        options = self.options = replace(
            self.options, denoise_steps=self.options.denoise_steps or document["num_steps"]
        )
        config = self.config = layout.network_config(directory, document)
        statistics, normalization = read_statistics(directory, document)
        self.state_normalizer, self.action_normalizer = (
            Normalizer(statistics[name], normalization[name], normalization["epsilon"], name)
            for name in ("state", "actions")
        )
        check_dimensions(
            directory, document, len(self.state_normalizer), len(self.action_normalizer)
        )
        self.buffers_in_weights = layout.read_buffers(directory)
        self.delta = []
        self._read_tokenizer(
            files.find_tokenizer(directory, document["vlm_model_name"]),
            document["tokenizer_max_length"],
        )
        with files.build_device(options.random_weights):
            self.backbone = SmolVLANetwork(config)
        widths = (config.expert_width, config.text["hidden_size"])
        chunk = self._add_heads(
            widths, config.action_dim, config.horizon, document["n_action_steps"]
        )
        self.spec = self._spec_of(chunk, (config.vision["image_size"],) * 2, None)
        if options.frozen_vlm:
            self.backbone.vlm_with_expert.vlm.requires_grad_(False)

    @classmethod
    def is_described(cls, directory: Path) -> bool:
        return has_processors(directory)

    def read_state(self, checkpoint: Path) -> files.State:
        return layout.read_state(checkpoint)

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        layout.copy_files(self.directory, self.tokenizer_file, checkpoint)
        state = layout.stored_tensors(self.backbone.state_dict(), self.buffers_in_weights)
        files.save(
            state,
            self.document,
            checkpoint,
            layout.stored_dtypes(self.stored_dtypes, self.buffers_in_weights),
            dtype,
        )

    def ids(self, instruction: str) -> list[int]:
        """Return the token ids of a prompt; lerobot ends it with a new line."""
        return self.tokenizer.encode(
            instruction if instruction.endswith("\n") else f"{instruction}\n"
        ).ids

    def encode_prefix(self, inputs: Inputs) -> Prefix:
        images = [
            resize_with_pad(inputs[f"image.{name}"], size)
            for name, size in self.spec.images.items()
        ]
        return self.backbone.prefix(
            torch.stack(images, dim=1), inputs["token_ids"], inputs["token_mask"]
        )

    def context(self, inputs: Inputs) -> Prefix:
        return self.backbone.with_state(self._prefix(inputs), inputs["state"])


def resize_with_pad(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to float32 ``[B, 3, *size]`` in [-1, 1].

    Bilinear without antialiasing, bars at the left or the top. Source: lerobot ``resize_with_pad``.
    """
    planes = images.permute(0, 3, 1, 2).float() / 255
    height, width = size
    ratio = max(planes.shape[3] / width, planes.shape[2] / height)
    inner = (int(planes.shape[2] / ratio), int(planes.shape[3] / ratio))
    planes = F.interpolate(planes, inner, mode="bilinear", align_corners=False)
    return F.pad(planes, (width - inner[1], 0, height - inner[0], 0)) * 2 - 1
