"""LoRA by peft, in peft's own directory layout. peft is imported when first used: reading a recipe must not take seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_vla.protocols import Policy
from rlinf_vla.types import UserError

if TYPE_CHECKING:
    from peft import LoraConfig

_PREFIX = "base_model.model."
_ADAPTER = ".default."


@dataclass
class LoraOptions:
    """Recipe node ``model.lora``."""

    rank: int = 32
    """0 trains every weight instead."""
    alpha: int | None = None
    """Scale is alpha / rank; null: alpha = rank."""
    targets: list[str] = field(default_factory=list)
    """Module-name suffixes in the backbone; empty: the model's own list."""


def add_lora(policy: Policy, options: LoraOptions, seed: int) -> None:
    """Freeze the backbone and put adapters into it. Factors A are random by ``seed``, B zero: the policy is unchanged."""
    if options.rank <= 0:
        return
    from peft import LoraConfig, inject_adapter_in_model

    targets = options.targets or list(policy.lora_targets)
    names = {name.rsplit(".", 1)[-1] for name, _ in policy.backbone.named_modules()}
    unknown = [target for target in options.targets if target.rsplit(".", 1)[-1] not in names]
    if unknown:
        raise UserError(f"model.lora.targets: no module of the backbone ends in {unknown[0]!r}; the default is {list(policy.lora_targets)}")
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha or options.rank, target_modules=targets, lora_dropout=0.0)
    policy.backbone.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, policy.backbone)


def is_lora(name: str) -> bool:
    return ".lora_" in name


def adapter_state(backbone: nn.Module) -> dict[str, Tensor]:
    """LoRA factors under the names that stock peft reads."""
    return {_PREFIX + name.replace(_ADAPTER, "."): value for name, value in backbone.state_dict().items() if is_lora(name)}


def save_adapter(backbone: nn.Module, directory: Path) -> None:
    config: LoraConfig = backbone.peft_config["default"]  # type: ignore[index,assignment]
    directory.mkdir(parents=True)
    config.save_pretrained(str(directory))
    save_file({name: value.contiguous() for name, value in adapter_state(backbone).items()}, directory / "adapter_model.safetensors")


def load_adapter(backbone: nn.Module, directory: Path) -> None:
    own = {_PREFIX + name.replace(_ADAPTER, "."): value for name, value in backbone.state_dict().items() if is_lora(name)}
    copy_all(load_file(directory / "adapter_model.safetensors"), own, directory)


def copy_all(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], source: Path) -> None:
    """Every tensor of ``stored`` into its namesake. Raises UserError, with nothing copied, unless names and shapes are the same."""
    differ = sorted(stored.keys() ^ own.keys()) or [name for name in sorted(own) if own[name].shape != stored[name].shape]
    if differ:
        raise UserError(f"{source} does not fit this model: {differ[0]} is missing or has another shape; use the model.* of its run")
    for name, value in own.items():
        value.copy_(stored[name])
