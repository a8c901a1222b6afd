"""GR00T N1.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.types import Inputs, Tensors

from .. import files
from ..cards import Card
from ..config_keys import check_keys
from ..flow_network import Prefix
from ..flow_policy import Features
from ..normalizer import Normalizer
from ..prompted_flow_policy import PromptedFlowPolicy
from . import checkpoint as layout
from .keys import KEYS
from .network import GR00TNetwork
from .options import MODES, GR00TOptions

TOKENIZER_OF = "Qwen/Qwen3-1.7B"
IMAGE_TOKENS = ("<IMG_CONTEXT>", "<img>", "</img>")
"""Tokens that Eagle adds to Qwen3's, in this order."""
PROMPT_LENGTH = 48


class GR00TPolicy(PromptedFlowPolicy):
    """GR00T N1.5 for one embodiment, whose projectors it has and trains."""

    name: ClassVar[str] = "gr00t"
    Config: ClassVar[type] = GR00TOptions
    built_from: ClassVar[tuple[str, ...]] = (
        files.CONFIG,
        layout.EAGLE_CONFIG,
        layout.METADATA,
        files.TOKENIZER,
    )
    cards: ClassVar[Sequence[Card]] = ()
    lora_targets: ClassVar[tuple[str, ...]] = GR00TOptions.lora_targets
    vision_modules: ClassVar[tuple[str, ...]] = ("backbone.eagle_model.vision_model",)
    language_modules: ClassVar[tuple[str, ...]] = ("backbone.eagle_model.language_model",)
    full_modules: ClassVar[tuple[str, ...]] = (
        "action_head.state_encoder",
        "action_head.action_encoder",
        "action_head.action_decoder",
    )
    float32_weights: ClassVar[tuple[str, ...]] = full_modules
    split_unsupported: ClassVar[str | None] = None
    head_modules: tuple[str, ...] = (
        *full_modules,
        "action_head.model",
        "action_head.future_tokens",
        "action_head.position_embedding",
    )
    padding_learns = False

    def __init__(self, directory: Path, options: GR00TOptions) -> None:
        super().__init__(directory, options)
        document = self.document = layout.read_document(directory)
        self.take_card({})
        self.remarks += check_keys(document, KEYS, directory / files.CONFIG)
        steps = options.denoise_steps or document["action_head_cfg"]["num_inference_timesteps"]
        options = self.options = replace(self.options, denoise_steps=steps)
        tag, self.projector = layout.read_embodiment(directory, document, options)
        self.state_normalizer, self.action_normalizer = (
            GR00TNormalizer(
                layout.read_statistics(directory, tag, kind, parts),
                MODES[options.normalization],
                0.0,
                kind,
            )
            for kind, parts in (("state", options.state), ("action", options.actions))
        )
        self.delta = []
        eagle = layout.eagle_config(directory, document)
        config = self.config = layout.head_config(document, eagle.width)
        self._check_dimensions(directory)
        self._read_tokenizer(files.find_tokenizer(directory, TOKENIZER_OF), PROMPT_LENGTH)
        self.tokenizer.add_special_tokens(list(IMAGE_TOKENS))
        with files.build_device(options.random_weights):
            self.backbone = GR00TNetwork(eagle, config)
        chunk = self._add_heads(
            (config.hidden, eagle.width), config.action_dim, config.horizon, config.horizon
        )
        self.spec = self._spec_of(chunk, (eagle.vision["image_size"],) * 2, None)
        before = self._ids(opening(len(self.spec.images), eagle.image_tokens))
        self.register_buffer("opening_ids", torch.tensor(before), persistent=False)
        image = self.tokenizer.token_to_id(IMAGE_TOKENS[0])
        self.register_buffer(
            "image_places",
            torch.tensor([i for i, token in enumerate(before) if token == image]),
            persistent=False,
        )
        if options.frozen_vlm:
            self.backbone.backbone.eagle_model.requires_grad_(False)

    opening_ids: Tensor
    """Token ids of a prompt before the instruction; images take ``image_places``."""
    image_places: Tensor

    def _check_dimensions(self, directory: Path) -> None:
        for option, normalizer, most in (
            ("state", self.state_normalizer, self.config.state_dim),
            ("actions", self.action_normalizer, self.config.action_dim),
        ):
            if len(normalizer) > most:
                stored = directory / layout.METADATA
                raise UserError(
                    f"model.options.{option}: {stored} has {len(normalizer)} numbers, the model takes {most}: name fewer"
                )

    def read_state(self, checkpoint: Path) -> files.State:
        return layout.read_state(checkpoint, self.projector)

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        layout.copy_files(self.directory, self.tokenizer_file, checkpoint)
        source = None if self.options.random_weights else self.directory
        embodiments = self.document["action_head_cfg"]["max_num_embodiments"]
        tensors = layout.stored_tensors(
            self.backbone.state_dict(), source, self.projector, embodiments
        )
        files.save(tensors, self.document, checkpoint, self.stored_dtypes, dtype)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def ids(self, instruction: str) -> list[int]:
        """Return the token ids of a prompt from the instruction on."""
        return self._ids(
            f"{[instruction] if self.options.instruction_as_list else instruction}{CLOSING}"
        )

    def encode_prefix(self, inputs: Inputs) -> Prefix:
        images = [
            cropped(inputs[f"image.{name}"], size, self.options.crop)
            for name, size in self.spec.images.items()
        ]
        ids, mask = inputs["token_ids"], inputs["token_mask"]
        before = self.opening_ids.expand(len(ids), -1)
        mask = torch.cat([torch.ones_like(before, dtype=torch.bool), mask], dim=1)
        return self.backbone.prefix(
            torch.stack(images, dim=1), torch.cat([before, ids], dim=1), self.image_places, mask
        )

    def context(self, inputs: Inputs) -> Prefix:
        return self.backbone.refined(self._prefix(inputs))

    def pack(self, features: Features) -> Tensors:
        """Without keys and values, which the head finds again: they take more than the states."""
        return super().pack(replace(features, prefix=replace(features.prefix, keys_and_values=[])))

    def unpack(self, tensors: Tensors) -> Features:
        features = super().unpack(tensors)
        return replace(features, prefix=self.backbone.with_keys(features.prefix))


class GR00TNormalizer(Normalizer):
    """Source: Isaac-GR00T ``data/transform/state_action.py``."""

    def __init__(
        self, statistics: dict[str, list[float]], mode: str, epsilon: float, what: str
    ) -> None:
        super().__init__(statistics, mode, epsilon, what)
        self.mode = mode

    def forward(self, values: Tensor) -> Tensor:
        unit = super().forward(values)
        constant = torch.zeros_like(values) if self.mode == MODES["min_max"] else values
        unit = torch.where(self.scale[: values.shape[-1]] == 0, constant, unit)
        return unit.clamp(-1, 1) if self.mode == MODES["q99"] else unit


def opening(cameras: int, image_tokens: int) -> str:
    """Return a prompt up to the instruction. Source: Eagle 2.5 VL's chat template and processor."""
    context, start, end = IMAGE_TOKENS
    images = "".join(f"<image {i + 1}>{start}{context * image_tokens}{end}" for i in range(cameras))
    return f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{images}"


CLOSING = "<|im_end|>\n<|im_start|>assistant\n"


def cropped(images: Tensor, size: tuple[int, int], share: float) -> Tensor:
    """Return the centre of uint8 ``[B, H, W, 3]`` as float32 ``[B, 3, *size]`` in [-1, 1].

    Bilinear with antialiasing; the aspect ratio may change. Sources: Isaac-GR00T ``VideoCrop`` and
    ``VideoResize``, which also cut the result to whole grey levels.
    """
    height, width = (int(side * share) for side in images.shape[1:3])
    top, left = round((images.shape[1] - height) / 2), round((images.shape[2] - width) / 2)
    planes = images[:, top : top + height, left : left + width].permute(0, 3, 1, 2).float() / 255
    return F.interpolate(planes, size, mode="bilinear", antialias=True) * 2 - 1
