"""Prepare images and prompts as OpenVLA's ``prismatic/extern/hf/processing_prismatic.py`` does.

A JPEG round trip, :func:`lanczos` and :func:`center_crop` are the official LIBERO evaluation's
preprocessing, from ``experiments/robot/openvla_utils.py``.
"""

from __future__ import annotations

import functools
import math

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.images import pillow_resized

from ..files import check_prompt

PROMPT = "In: What action should the robot take to {instruction}?\nOut:"

# The released preprocessor_config.json holds these bf16-rounded values.
DINO_MEAN = (0.484375, 0.455078125, 0.40625)
DINO_STD = (0.228515625, 0.2236328125, 0.224609375)
SIGLIP_MEAN, SIGLIP_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
LETTERBOX_FILL = (127, 127, 127)
LANCZOS_LOBES = 3
CROP_AREA = 0.9
"""Share of an image's area that the crops of training and evaluation keep."""

STRATEGIES = ("resize-naive", "letterbox", "resize-crop")


def resize(images: Tensor, size: tuple[int, int], strategy: str = "resize-naive") -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to uint8 ``[B, 3, *size]`` by Pillow's bicubic kernel.

    ``strategy`` (``image_resize_strategy`` of config.json): resize-naive ignores the aspect ratio,
    resize-crop crops the longer sides, letterbox first pads the shorter sides with grey. The latter
    two need a square ``size``. Raises UserError for another strategy.
    """
    if strategy not in STRATEGIES:
        raise UserError(
            f"image_resize_strategy {strategy!r} of config.json is not known: one of {', '.join(STRATEGIES)}"
        )
    if tuple(images.shape[1:3]) != size:
        images = _resized(images, size, strategy)
    return images.permute(0, 3, 1, 2).contiguous()


def _resized(images: Tensor, size: tuple[int, int], strategy: str) -> Tensor:
    if strategy == "resize-naive":
        return pillow_resized(images, size, "bicubic")
    batch, *sides = images.shape[:3]
    if strategy == "letterbox":
        rows, columns = (int((max(sides) - side) / 2) for side in sides)
        canvas = (
            images.new_tensor(LETTERBOX_FILL)
            .expand(batch, sides[0] + 2 * rows, sides[1] + 2 * columns, 3)
            .clone()
        )
        canvas[:, rows : rows + sides[0], columns : columns + sides[1]] = images
        images = canvas
        sides = list(canvas.shape[1:3])
    target = size[0]
    shorter = min(sides)
    height, width = (target if side == shorter else int(target * side / shorter) for side in sides)
    images = pillow_resized(images, (height, width), "bicubic")
    top, left = round((height - target) / 2), round((width - target) / 2)
    return images[:, top : top + target, left : left + target]


def lanczos(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 ``[B, H, W, 3]`` to ``[B, 3, *size]`` by anti-aliased Lanczos with three lobes.

    As ``tf.image.resize(method="lanczos3", antialias=True)``, rounded. PIL's rounds between its two
    passes and differs by up to 3 levels.
    """
    rows, columns = (
        _lanczos_weights(*sides, images.device)
        for sides in zip(images.shape[1:3], size, strict=True)
    )
    return (rows @ images.permute(0, 3, 1, 2).double() @ columns.T).round().clamp(0, 255).byte()


@functools.lru_cache(maxsize=64)
def _lanczos_weights(before: int, after: int, device: torch.device) -> Tensor:
    """``[after, before]``, rows sum to one."""
    scale = before / after
    centres = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(before) + 0.5 - centres[:, None]) / max(scale, 1)
    weights = torch.where(
        distance.abs() < LANCZOS_LOBES, distance.sinc() * (distance / LANCZOS_LOBES).sinc(), 0
    )
    return (weights / weights.sum(dim=1, keepdim=True)).to(device)


def center_crop(images: Tensor) -> Tensor:
    """Crop uint8 ``[B, 3, H, W]`` to CROP_AREA and resize back, as ``tf.image.crop_and_resize``."""
    rows, columns = (_crop_weights(side, images.device) for side in images.shape[2:])
    cropped = (rows @ (images.double() / 255) @ columns.T).clamp(0, 1)
    return (cropped * 255.5).clamp(max=255).byte()  # truncates, as tf.image.convert_image_dtype


@functools.lru_cache(maxsize=64)
def _crop_weights(side: int, device: torch.device) -> Tensor:
    """``[side, side]``, rows sum to one."""
    crop = math.sqrt(CROP_AREA)
    places = ((1 - crop) / 2 + crop * torch.linspace(0, 1, side, dtype=torch.float64)) * (side - 1)
    return (1 - (places[:, None] - torch.arange(side)).abs()).clamp(min=0).to(device)


class PixelNormalizer(nn.Module):
    """Normalise uint8 ``[B, 3, H, W]`` for DINO and SigLIP; return float32 ``[B, 6, H, W]``."""

    def __init__(self) -> None:
        super().__init__()
        statistics = torch.tensor([DINO_MEAN, DINO_STD, SIGLIP_MEAN, SIGLIP_STD])[..., None, None]
        self.register_buffer("statistics", statistics, persistent=False)

    statistics: Tensor

    def forward(self, images: Tensor) -> Tensor:
        scaled = images.float() / 255
        statistics = self.statistics
        return torch.cat(
            [(scaled - statistics[0]) / statistics[1], (scaled - statistics[2]) / statistics[3]],
            dim=1,
        )


class PromptEncoder:
    """Encode instructions as ids of fixed length: ``[BOS, padding, prompt, empty token]``."""

    def __init__(
        self, tokenizer: Tokenizer, length: int, bos_id: int, pad_id: int, empty_id: int
    ) -> None:
        self.tokenizer = tokenizer
        self.length = length
        self.bos_id = bos_id
        self.pad_id = pad_id
        self.empty_id = empty_id
        self._cache: dict[str, list[int]] = {}

    def ids(self, instruction: str) -> list[int]:
        """Return unpadded ids, with the empty token ("▁", 29871 in Llama 2) at the end.

        Like the official code, append it only if the tokenizer did not.
        """
        if instruction not in self._cache:
            text = PROMPT.format(instruction=instruction.lower())
            ids = [self.bos_id, *self.tokenizer.encode(text, add_special_tokens=False).ids]
            self._cache[instruction] = ids if ids[-1] == self.empty_id else [*ids, self.empty_id]
        return self._cache[instruction]

    def __call__(self, instructions: list[str]) -> tuple[Tensor, Tensor]:
        """Return ids int64 and mask bool ``[B, length]``. Raises UserError for longer prompts."""
        rows, masks = [], []
        for instruction in instructions:
            ids = self.ids(instruction)
            check_prompt(instruction, len(ids), self.length)
            padding = self.length - len(ids)
            rows.append([self.bos_id] + [self.pad_id] * padding + ids[1:])
            masks.append([True] + [False] * padding + [True] * (len(ids) - 1))
        return torch.tensor(rows), torch.tensor(masks)
