"""The directory layout of a published OpenVLA checkpoint, read and written without running any code of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf_vla.types import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
STATISTICS, TOKENIZER = "dataset_statistics.json", "tokenizer.json"


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict):
            raise ValueError("an object is expected")
        return document
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not an OpenVLA checkpoint: {path.name} is missing") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): copy the checkpoint again") from None


def read_statistics(directory: Path, config: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Un-normalisation statistics of one dataset; a fine-tune's dataset_statistics.json replaces ``norm_stats`` of config.json."""
    path = directory / STATISTICS
    statistics = read_json(path) if path.exists() else config.get("norm_stats", {})
    if key is None and len(statistics) == 1:
        return next(iter(statistics.values()))
    if key is None or key not in statistics:
        raise UserError(f"model.options.unnorm_key={key}: {directory} has statistics for {sorted(statistics)}, choose one")
    return statistics[key]


def read_tokenizer(directory: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(directory / TOKENIZER))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{directory / TOKENIZER} cannot be read ({error}): copy the checkpoint again") from None


def has_weights(directory: Path) -> bool:
    return (directory / WEIGHTS).exists() or (directory / INDEX).exists()


def read_weights(directory: Path) -> dict[str, Tensor]:
    """One safetensors file or a sharded set."""
    names = [WEIGHTS]
    if (directory / INDEX).exists():
        names = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
    state: dict[str, Tensor] = {}
    for name in names:
        state |= _read_safetensors(directory / name)
    return state


def read_component(directory: Path, name: str) -> dict[str, Tensor] | None:
    """A part that openvla-oft keeps beside the model, ``NAME--STEP_checkpoint.pt``, or ours, ``NAME.safetensors``; None: no such part.

    Unpickled as tensors only: no code of the checkpoint runs.
    """
    if (directory / f"{name}.safetensors").exists():
        return _read_safetensors(directory / f"{name}.safetensors")
    found = sorted(directory.glob(f"{name}--*_checkpoint.pt"), key=_step)
    if not found:
        return None
    try:
        state = torch.load(found[-1], map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile pickle makes of itself
        reason = str(error).splitlines()[0]
        raise UserError(f"{found[-1]} cannot be read as tensors ({reason}): it is damaged or holds code, copy it again") from None
    return {key.removeprefix("module."): value for key, value in state.items()}


def _step(path: Path) -> float:
    """``latest`` is the newest."""
    step = path.name.split("--")[1].removesuffix("_checkpoint.pt")
    return float(step) if step.isdigit() else float("inf")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): the file is missing or damaged, copy it again") from None


def fill(module: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
    """Fill ``module``; every key must be there, with its shape. Computes in float32."""
    expected = module.state_dict()
    for problem, keys in (("missing", expected.keys() - state.keys()), ("unexpected", state.keys() - expected.keys())):
        if keys:
            raise UserError(f"{directory} does not fit its config.json: {len(keys)} {problem} weights, first {min(keys)}")
    for key, value in state.items():
        if value.shape != expected[key].shape:
            raise UserError(f"{directory}: {key} has shape {list(value.shape)}, config.json says {list(expected[key].shape)}")
        if not torch.isfinite(value).all():
            raise UserError(f"{directory}: {key} holds NaN or infinite values, the checkpoint is damaged")
    module.load_state_dict({key: value.float() for key, value in state.items()})


def save_weights(module: nn.Module, path: Path, dtype: torch.dtype) -> None:
    save_file({key: value.to(dtype).contiguous() for key, value in module.state_dict().items()}, path)
    path.chmod(0o644)  # safetensors makes files that their owner alone can read
