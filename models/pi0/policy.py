"""π₀ and π₀.₅."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import Noise
from rlinf_vla.core.types import Inputs, Observation

from .. import files
from ..cards import names_part
from ..config_file import read_config
from ..config_keys import check_keys
from ..flow_network import Prefix
from ..flow_policy import FlowPolicy
from ..lerobot import check_cameras, check_dimensions, has_processors, processor_remarks
from . import lerobot
from .cards import CARDS
from .checkpoint import network_config, read_document, read_normalizers, read_state
from .network import Pi0Network
from .openpi import METADATA, PARAMS
from .options import Pi0Options
from .processor import (
    NORM_STATS,
    PromptEncoder,
    copy_statistics,
    delta_dimensions,
    resize_with_pad,
    to_unit_range,
)

PROMPT_LENGTHS = {False: 48, True: 200}
"""Whether the state is in the prompt -> token ids per prompt, as in openpi."""


class Pi0Policy(FlowPolicy):
    """π₀ or π₀.₅."""

    name: ClassVar[str] = "pi0"
    Config: ClassVar[type] = Pi0Options
    built_from: ClassVar[tuple[str, ...]] = (files.CONFIG, NORM_STATS, files.TOKENIZER)
    sources: ClassVar[Sequence[str]] = (f"{PARAMS}/{METADATA}", *files.SOURCES)
    cards = CARDS
    bars: ClassVar[float | None] = 0.5
    layout = staticmethod(lerobot.layout_of)
    sizes: ClassVar[dict[str, str]] = {"pi05": "asset://pi05_3b", "pi0": "asset://pi0_3b"}
    dataset_option: ClassVar[str] = "asset_id"
    lora_targets: ClassVar[tuple[str, ...]] = Pi0Options.lora_targets
    vision_modules: ClassVar[tuple[str, ...]] = (
        "paligemma_with_expert.paligemma.model.vision_tower",
    )
    language_modules: ClassVar[tuple[str, ...]] = (
        "paligemma_with_expert.paligemma.model.language_model",
    )
    full_modules: ClassVar[tuple[str, ...]] = (
        *("action_in_proj", "action_out_proj", "state_proj"),
        *("action_time_mlp_in", "action_time_mlp_out", "time_mlp_in", "time_mlp_out"),
    )
    float32_weights: ClassVar[tuple[str, ...]] = (
        *("vision_model.embeddings.", "input_layernorm", "post_attention_layernorm", "model.norm"),
        *full_modules,
    )
    """Those of openpi's ``to_bfloat16_for_selected_params``, and what is outside its cast."""
    split_unsupported: ClassVar[str | None] = None
    augmentation_unsupported: str | None = None
    condition_unsupported: str | None = None
    head_modules: tuple[str, ...] = ("paligemma_with_expert.gemma_expert.model", *full_modules)

    def __init__(self, directory: Path, options: Pi0Options) -> None:
        super().__init__(directory, options)
        document = self.document = read_document(directory)
        card = self.take_card(document)
        options = self.options
        delta_mask = None if options.delta_mask is None else list(options.delta_mask)
        asked = {
            "action_horizon": options.action_horizon,
            "simulated_delay": options.simulated_delay,
            "delta_mask": delta_mask,
        }
        document |= {key: value for key, value in asked.items() if value is not None}
        config = self.config = network_config(document)
        self.remarks += check_keys(
            document,
            lerobot.table_of(document, config.vision["image_size"]),
            directory / files.CONFIG,
        )
        self.state_normalizer, self.action_normalizer = read_normalizers(
            directory, document, options.asset_id
        )
        if (
            most := max(len(self.state_normalizer), len(self.action_normalizer))
        ) > config.action_dim:
            raise UserError(
                f"{directory}: statistics have {most} numbers, the model {config.action_dim}: copy the checkpoint again"
            )
        if lerobot.is_one(document):
            check_cameras(directory, document, options.images)
            check_dimensions(
                directory, document, len(self.state_normalizer), len(self.action_normalizer)
            )
            self.remarks += processor_remarks(directory, bool(document.get("use_relative_actions")))
            if (
                has_processors(directory) and "norm_stats" not in document
            ):  # else they were put there
                self.remarks.append(f"statistics: {NORM_STATS}, not the processors beside it")
        document["delta_mask"] = lerobot.delta_mask(document, len(self.action_normalizer))
        steps = options.denoise_steps or document.get(
            "num_inference_steps", document.get("num_steps", 10)
        )
        options = self.options = replace(options, denoise_steps=steps)
        with_state = config.pi05 if options.state_in_prompt is None else options.state_in_prompt
        self.delta = delta_dimensions(
            document["delta_mask"], len(self.action_normalizer), len(self.state_normalizer)
        )
        self.simulated_delay: int = document.get("simulated_delay", 0)
        length = options.prompt_length or PROMPT_LENGTHS[with_state]
        self.tokenizer = files.find_tokenizer(directory, lerobot.PALIGEMMA)
        bos = document.get("bos_token_id", 2)
        numbers = options.prompt_state_dim or 0
        self.prompts = PromptEncoder(
            files.read_tokenizer(self.tokenizer.parent), length, bos, with_state, numbers
        )
        with files.build_device(options.random_weights):
            self.backbone: Pi0Network = Pi0Network(config)
        widths = (config.expert.width, config.paligemma.width)
        chunk = self._add_heads(
            widths,
            config.action_dim,
            config.horizon,
            document.get("n_action_steps", config.horizon),
        )
        self.spec = self._spec_of(chunk, (config.vision["image_size"],) * 2, card)
        if options.frozen_vlm:
            self.backbone.paligemma_with_expert.paligemma.requires_grad_(False)

    @classmethod
    def is_described(cls, directory: Path) -> bool:
        """JAX's arrays have their own sizes; early versions of lerobot kept statistics among the
        weights. openpi's config.json does not tell π₀.₅ from π₀, but the names of published
        checkpoints do."""
        if not (directory / files.CONFIG).exists():
            return False
        config = read_config(directory)
        if lerobot.is_one(config):
            return "norm_stats" in config or has_processors(directory)
        return "pi05" in config or names_part(directory, "pi0")

    def read_state(self, checkpoint: Path) -> files.State:
        return read_state(checkpoint)

    def save(self, checkpoint: Path, dtype: torch.dtype | None = None) -> None:
        shutil.copyfile(self.tokenizer, checkpoint / files.TOKENIZER)
        copy_statistics(self.directory, checkpoint)
        files.save(self.backbone.state_dict(), self.document, checkpoint, self.stored_dtypes, dtype)

    def fit_instructions(self, instructions: Sequence[str]) -> None:
        highest = torch.ones(self.spec.state_dim)  # its bins have three digits each
        needed = {
            instruction: len(self.prompts.ids(instruction, highest)) for instruction in instructions
        }
        default = PROMPT_LENGTHS[self.prompts.with_state]
        self.prompts.length = files.prompt_length(self.options.prompt_length, default, needed)

    def prepare(self, obs: Observation) -> Inputs:
        inputs = {
            f"image.{name}": resize_with_pad(obs.images[name], size)
            for name, size in self.spec.images.items()
        }
        state = self.state_normalizer(obs.state)
        padding = (0, self.config.action_dim - state.shape[-1])
        return inputs | self.prompt(obs) | {"state": F.pad(state, padding)}

    def prompt(self, obs: Observation) -> Inputs:
        state = self.state_normalizer(obs.state)
        token_ids, token_mask = self.prompts(obs.instruction, state)
        return {
            "token_ids": token_ids.to(state.device),
            "token_mask": token_mask.to(state.device),
        }

    def augment(self, inputs: Inputs, noise: Noise) -> Inputs:
        from .augmentation import openpi_augmented

        images = {
            f"image.{name}": openpi_augmented(
                inputs[f"image.{name}"], noise, moves="wrist" not in name
            )
            for name in self.spec.images
        }
        return inputs | images

    def encode_prefix(self, inputs: Inputs) -> Prefix:
        images = to_unit_range(
            torch.stack([inputs[f"image.{name}"] for name in self.spec.images], dim=1)
        )
        everywhere = inputs["token_mask"].new_ones(images.shape[:2])
        return self.backbone.prefix(images, everywhere, inputs["token_ids"], inputs["token_mask"])
