"""LoRA by peft, in peft's own directory layout. peft is imported when first used: reading a recipe must not take seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_vla.protocols import Policy
from rlinf_vla.types import UserError

if TYPE_CHECKING:
    from peft import LoraConfig

_PREFIX = "base_model.model."
_ADAPTER = ".default."
_BASE = ".base_layer.weight"
_CONFIG, _FACTORS = "adapter_config.json", "adapter_model.safetensors"


@dataclass
class LoraOptions:
    """Recipe node ``model.lora``."""

    rank: int = 32
    """0 trains every weight instead."""
    alpha: int | None = None
    """Scale is alpha / rank; null: alpha = rank."""
    targets: list[str] = field(default_factory=list)
    """Module-name suffixes in the backbone; empty: the model's own list."""
    adapter: str | None = None
    """Start from this PEFT directory, such as the official fine-tuning scripts write; it says rank, alpha and targets."""


def add_lora(policy: Policy, options: LoraOptions, seed: int) -> None:
    """Freeze the backbone and put adapters into it: those of ``options.adapter``, or fresh ones, whose factors A are random by ``seed``, B
    zero, so that the policy is unchanged. In float32, whatever the backbone is in: small steps would be lost otherwise."""
    if options.adapter is not None:
        directory = Path(options.adapter).expanduser()
        _inject(policy.backbone, _stored_config(directory), seed)
        with torch.no_grad():
            load_adapter(policy.backbone, directory)
        return
    if options.rank <= 0:
        return
    from peft import LoraConfig

    targets = options.targets or list(policy.lora_targets)
    names = {name.rsplit(".", 1)[-1] for name, _ in policy.backbone.named_modules()}
    unknown = [target for target in options.targets if target.rsplit(".", 1)[-1] not in names]
    if unknown:
        raise UserError(f"model.lora.targets: no module of the backbone ends in {unknown[0]!r}; the default is {list(policy.lora_targets)}")
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha or options.rank, target_modules=targets, lora_dropout=0.0)
    _inject(policy.backbone, config, seed)


def _inject(backbone: nn.Module, config: LoraConfig, seed: int) -> None:
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    backbone.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, backbone)
    cast_adapter_dtype(backbone, "default")


def _stored_config(directory: Path) -> LoraConfig:
    from peft import LoraConfig, PeftConfig

    if not (directory / _CONFIG).exists():
        raise UserError(f"model.lora.adapter={directory} is not a PEFT directory: {_CONFIG} is missing")
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{directory / _CONFIG} cannot be read ({str(error).splitlines()[0]}): copy the adapter again") from None
    # other initialisations change the base weights, too
    if not isinstance(config, LoraConfig) or config.init_lora_weights not in (True, "gaussian") or config.modules_to_save:
        raise UserError(f"model.lora.adapter={directory}: only plain LoRA is supported; merge this adapter with the tool that made it")
    config.inference_mode, config.lora_dropout = False, 0.0
    return config


def merge_lora(backbone: nn.Module) -> None:
    """Fold the adapters into the weights that they adapt, by peft's own merge; module names are again those before ``add_lora``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(backbone.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(backbone.get_submodule(parent), last, module.get_base_layer())


def is_lora(name: str) -> bool:
    return ".lora_" in name


def adapter_state(backbone: nn.Module) -> dict[str, Tensor]:
    """LoRA factors under the names that stock peft reads."""
    return {_PREFIX + name.replace(_ADAPTER, "."): value for name, value in backbone.state_dict().items() if is_lora(name)}


def save_adapter(backbone: nn.Module, directory: Path) -> None:
    config: LoraConfig = backbone.peft_config["default"]  # type: ignore[index,assignment]
    directory.mkdir(parents=True)
    config.save_pretrained(str(directory))
    save_file({name: value.contiguous() for name, value in adapter_state(backbone).items()}, directory / _FACTORS)


def load_adapter(backbone: nn.Module, directory: Path) -> None:
    """Also one that, as peft does where the output layer is adapted, repeats that layer's own weight."""
    try:
        stored = load_file(directory / _FACTORS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{directory / _FACTORS} cannot be read ({error}): the file is missing or damaged, copy it again") from None
    repeated = {_PREFIX + name: value for name, value in backbone.state_dict().items() if name.endswith(_BASE)}
    own = adapter_state(backbone) | {name: value for name, value in repeated.items() if name in stored}
    copy_all(stored, own, directory)


def copy_all(stored: Mapping[str, Tensor], own: Mapping[str, Tensor], source: Path) -> None:
    """Every tensor of ``stored`` into its namesake. Raises UserError, with nothing copied, unless names and shapes are the same."""
    differ = sorted(stored.keys() ^ own.keys()) or [name for name in sorted(own) if own[name].shape != stored[name].shape]
    if differ:
        raise UserError(f"{source} does not fit this model: {differ[0]} is missing or has another shape; use the model.* of its run")
    for name, value in own.items():
        value.copy_(stored[name])
