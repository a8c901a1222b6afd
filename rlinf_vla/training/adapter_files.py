"""Read the files of a PEFT directory, which may be anyone's: checked before anything is built.

``adapter_config.json`` of plain LoRA alone is accepted, with module names instead of patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError, printable
from rlinf_vla.config.ranges import Range
from rlinf_vla.core.io import parse_json
from rlinf_vla.core.weights import fault
from rlinf_vla.training.ranks import is_sharded

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG = "adapter_config.json"
FACTORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MOST_BYTES = 2**20
MOST_NAMES = 2048
RANK = Range(1, 4096)
ALPHA = Range(0, 1e6, above=True)
NAME = re.compile(r"[\w.-]{1,200}")
OWN_PATTERN = re.compile(r"\((?:[\w|]|\\[.-]){1,60000}\)\(\\\.\.\*\)\?")
"""``exclude_modules`` as ``lora.add_lora`` writes it: names of modules, and what is below them."""
NO_EFFECT = (
    *(
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
    ),
    *("fan_in_fan_out", "loftq_config", "megatron_core", "qalora_group_size"),
)
"""Keys without effect on a loaded adapter; others that are not read must be switched off."""
INITS = (True, False, "gaussian")
"""Others change the weights of the base, or need files."""
OFF: tuple[Any, ...] = (None, False, 0, "", "none", {}, [])
FIX = "copy it again"


def read_config(directory: Path) -> LoraConfig:
    """Return a PEFT directory's configuration. Raises UserError if it is not one of plain LoRA."""
    from peft import LoraConfig

    document = _document(directory)
    config = LoraConfig(**_checked(document, directory))
    base = document.get("base_model_name_or_path")
    config.base_model_name_or_path = base[:200] if isinstance(base, str) else None
    return config


def _document(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.exists():
        raise UserError(
            f"model.lora.adapter={directory} is not a PEFT directory: {CONFIG} is missing"
        )
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        document = parse_json(path.read_text())
        if not isinstance(document, dict):
            raise ValueError("an object is expected")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): copy the adapter again") from None
    return document


def _checked(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the arguments of ``LoraConfig``. Raises UserError."""
    checks: dict[str, Callable[[Any], bool]] = {
        "r": lambda value: type(value) is int and RANK.allows(value),
        "lora_alpha": ALPHA.allows,
        "target_modules": lambda value: _names(value) and bool(value),
        "exclude_modules": lambda value: (
            value is None
            or _names(value)
            or (isinstance(value, str) and bool(OWN_PATTERN.fullmatch(value)))
        ),
        "use_rslora": lambda value: isinstance(value, bool),
        "init_lora_weights": lambda value: True,
        "rank_pattern": lambda value: _numbers(value, RANK),
        "alpha_pattern": lambda value: _numbers(value, ALPHA),
    }
    other = [
        name
        for name in document.keys() - checks.keys() - set(NO_EFFECT)
        if document[name] not in OFF
    ]
    other += [
        name
        for name, kinds in (("peft_type", ("LORA",)), ("init_lora_weights", INITS))
        if document.get(name, kinds[0]) not in kinds
    ]
    if other:
        named = printable(min(other))[:60]
        raise UserError(
            f"model.lora.adapter={directory}: only plain LoRA is supported, not its {named}; merge this adapter with the tool that made it"
        )
    arguments = {
        name: document.get(name)
        for name in checks
        if name in document or name in ("r", "target_modules")
    }
    for name, value in arguments.items():
        if not checks[name](value):
            requirement = {
                "r": f"a whole {str(RANK).removeprefix('a ')}",
                "lora_alpha": str(ALPHA),
            }.get(name, "names of modules in a list")
            value_text = (
                printable(str(value)[:60])
                if isinstance(value, str | int | float)
                else f"a {type(value).__name__}"
            )
            raise UserError(
                f"{directory / CONFIG}: {name} is {value_text}, {requirement} is supported: merge it with the tool that made it"
            )
    return arguments


def _names(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MOST_NAMES
        and all(isinstance(name, str) and NAME.fullmatch(name) is not None for name in value)
    )


def _numbers(value: Any, allowed: Range) -> bool:
    return (
        isinstance(value, dict)
        and _names(list(value))
        and all(allowed.allows(number) for number in value.values())
    )


def check_ranks(config: LoraConfig, directory: Path) -> None:
    """Raise UserError unless the stored factors have the ranks of ``config``, which is quick."""
    path = directory / FACTORS
    if not path.exists() and (directory / PICKLE).exists():
        convert = f"save_file(torch.load('{PICKLE}', weights_only=True), '{FACTORS}')"
        raise UserError(
            f"{directory} has no {FACTORS}, only {PICKLE}, a pickle, which could run code and is not read: convert it there with "
            f'`python -c "import torch; from safetensors.torch import save_file; {convert}"`'
        )
    with _reading(path, FIX), safe_open(path, "pt") as file:
        ranks = {file.get_slice(name).get_shape()[0] for name in file.keys() if ".lora_A." in name}  # noqa: SIM118
    special = set((config.rank_pattern or {}).values())
    config_ranks = {config.r, *special}
    if ranks not in (config_ranks, special):  # the pattern may name all modules
        raise UserError(
            f"{path} has factors of rank {sorted(ranks)}, {CONFIG} says {sorted(config_ranks)}: {FIX}"
        )


@contextmanager
def _reading(path: Path, fix: str) -> Iterator[None]:
    """Turn an error of reading ``path`` into a UserError that ends in ``fix``."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({error}), the file is missing or damaged: {fix}"
        ) from None


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    path.chmod(0o644)  # safetensors creates files that only their owner can read


def read_tensors(path: Path, fix: str = FIX) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError if it is damaged or a number is
    not finite."""
    with _reading(path, fix):
        tensors = load_file(path)
    for name, value in tensors.items():
        if value.is_floating_point() and (problem := fault(value)) is not None:
            raise UserError(f"{path}: {name} {problem}")
    return tensors


LAYERS = 16
CLOSE = 0.2
CLEAR = 0.1


@torch.no_grad()
def refuse_merged(backbone: nn.Module, directory: Path) -> None:
    """Raise UserError if the adapter in ``backbone`` is merged into its weights already.

    Of weights W that contain a product P of factors, the projection <W, P> / <P, P> is near 1; of
    other weights it is near 0, with a standard deviation of about |W| / |P| / sqrt(size of W). The
    adapter is taken as merged if the mean over up to LAYERS layers is certain (CLEAR), and it and
    three quarters of the layers are near 1 (CLOSE).
    """
    from peft.tuners.lora import Linear

    layers: list[Any] = [module for module in backbone.modules() if isinstance(module, Linear)]
    estimates: list[tuple[float, float]] = []
    for layer in layers[:: max(len(layers) // LAYERS, 1)]:
        weight = layer.get_base_layer().weight
        a = layer.lora_A["default"].weight
        b = layer.lora_B["default"].weight
        if any(map(is_sharded, (weight, a, b))):
            return
        a = a.float()
        b = b.float() * layer.scaling["default"]
        weight = weight.float()
        size = float(((b.T @ b) * (a @ a.T)).sum())
        if size > 0:
            share = float((b.T @ weight @ a.T).trace()) / size
            estimates.append((share, float(weight.norm()) / (size * weight.numel()) ** 0.5))
    if not estimates:
        return
    weights = [1 / max(noise, 1e-6) ** 2 for _, noise in estimates]
    mean = sum(
        share * share_weight for (share, _), share_weight in zip(estimates, weights, strict=True)
    ) / sum(weights)
    near = sum(abs(share - 1) < CLOSE + 3 * noise for share, noise in estimates)
    if abs(mean - 1) < CLOSE and sum(weights) ** -0.5 < CLEAR and near >= 0.75 * len(estimates):
        raise UserError(
            f"{directory}: the weights of model.checkpoint contain this adapter already, it would be applied twice: "
            "leave the adapter out, or choose the checkpoint that it was trained on"
        )
