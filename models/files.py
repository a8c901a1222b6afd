"""Files of published checkpoints, read and written without running any code of the checkpoint."""

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
TOKENIZER = "tokenizer.json"


def read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        if not isinstance(document, dict):
            raise ValueError("an object is expected")
        return document
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a checkpoint of this model: {path.name} is missing") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): copy the checkpoint again") from None


def read_tokenizer(directory: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(directory / TOKENIZER))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{directory / TOKENIZER} cannot be read ({error}): copy the checkpoint again") from None


def read_weights(directory: Path) -> dict[str, Tensor]:
    """One safetensors file or a sharded set."""
    if (directory / INDEX).exists():
        names = sorted(set(read_json(directory / INDEX)["weight_map"].values()))
    elif (directory / WEIGHTS).exists():
        names = [WEIGHTS]
    else:
        mend = "choose another model.checkpoint, or set model.options.random_weights=true"
        raise UserError(f"{directory} has no {WEIGHTS}: {mend}")
    state: dict[str, Tensor] = {}
    for name in names:
        state |= read_safetensors(directory / name)
    return state


def read_safetensors(path: Path) -> dict[str, Tensor]:
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
