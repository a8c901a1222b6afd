"""Read and write the files of published checkpoints without running code from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import parse_json
from rlinf_vla.core.types import fault

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FULL_WEIGHTS = "full_weights.pt"
"""What RLinf writes of a trained network, to be put beside the other files of its start."""
SOURCES = (FULL_WEIGHTS, WEIGHTS, INDEX)
"""Files of weights in their order of precedence; that of the last two is transformers'."""
TOKENIZER = "tokenizer.json"
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file that has not been read."""

    path: Path
    key: str
    shape: torch.Size

    def read(self) -> Tensor:
        """Memory-map the tensor; the mapping lives as long as the tensor. Copy one at a time."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.key)


@dataclass(frozen=True)
class Mapped:
    """A tensor of a memory-mapped pickle."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def read(self) -> Tensor:
        return self.tensor


class Unread(Protocol):
    """A tensor that is read when it is needed, such as a ``Stored`` one."""

    @property
    def shape(self) -> torch.Size: ...

    def read(self) -> Tensor: ...


State = Mapping[str, Tensor | Unread]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError if the file is missing or not valid."""
    try:
        document = parse_json(path.read_text())
        if not isinstance(document, dict):
            raise ValueError("an object is expected")
        return document
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} is not a checkpoint of this model: {path.name} is missing"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): copy the checkpoint again") from None


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read tokenizer.json, without the truncation and padding that transformers stores of its last
    call there. Raises UserError."""
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            f"{directory / TOKENIZER} cannot be read ({error}): copy the checkpoint again"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_tokenizer(directory: Path, repository: str) -> Path:
    """Return tokenizer.json, which openpi and lerobot do not copy: else that of ``repository``.

    Raises UserError if there is neither, nor a copy in Hugging Face's cache.
    """
    if (path := directory / TOKENIZER).exists():
        return path
    from huggingface_hub import hf_hub_download  # takes time to import

    try:
        return Path(hf_hub_download(repository, TOKENIZER))
    except Exception as error:  # also those of the HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            f"{directory} has no {TOKENIZER}, and that of {repository} cannot be downloaded ({reason}): accept its conditions at "
            f"https://huggingface.co/{repository} and run `huggingface-cli login`, or copy its {TOKENIZER} into the directory"
        ) from None


def prompt_length(given: int | None, default: int, tokens: Mapping[str, int]) -> int:
    """Return the length for prompts of ``tokens`` ids by instruction: ``given``, or large enough.

    ``given``: ``model.options.prompt_length``. Raises UserError if that is too short.
    """
    if given is None:
        return max(default, *tokens.values()) if tokens else default
    for instruction, count in tokens.items():
        check_prompt(instruction, count, given)
    return given


def check_prompt(instruction: str, tokens: int, length: int) -> None:
    """Raise UserError if the prompt of ``instruction`` takes more than ``length`` token ids."""
    if tokens > length:
        raise UserError(
            f"instruction {instruction!r} takes {tokens} tokens, model.options.prompt_length is {length}: "
            f"set model.options.prompt_length={tokens} or more"
        )


def padded_prompts(
    prompts: Sequence[tuple[str, Sequence[int]]], length: int
) -> tuple[Tensor, Tensor]:
    """Return ids int64 and mask bool ``[B, length]``, padded on the right, of instructions and ids.

    Raises UserError for longer prompts.
    """
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    mask = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, (instruction, tokens) in enumerate(prompts):
        check_prompt(instruction, len(tokens), length)
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = True
    return ids, mask


def read_weights(directory: Path) -> Mapping[str, Unread]:
    """Return the tensors of the first of SOURCES, unread. Raises UserError."""
    source = next((name for name in SOURCES if (directory / name).exists()), None)
    if source is None:
        raise UserError(_without_weights(directory))
    if source == FULL_WEIGHTS:
        return {name: Mapped(tensor) for name, tensor in read_pickle(directory / source).items()}
    state: dict[str, Stored] = {}
    for name in [source] if source == WEIGHTS else _shards(directory / source):
        state |= read_safetensors(directory / name)
    return state


def weight_remarks(directory: Path, sources: Sequence[str] = SOURCES) -> list[str]:
    """Return a line on the weights that are read, unless a checkpoint has them alone.

    ``sources`` in their order of precedence.
    """
    names = [name for name in sources if (directory / name).exists()]
    if not names or (len(names) == 1 and names[0] != FULL_WEIGHTS):
        return []
    return [
        f"weights: {names[0]}" + (f", not {' or '.join(names[1:])} beside it" if names[1:] else "")
    ]


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle, which is loaded so that no code in it runs.

    Raises UserError if it holds anything else.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        if not isinstance(state, dict) or not all(
            isinstance(tensor, Tensor) for tensor in state.values()
        ):
            raise ValueError("a map of names to tensors is expected")
    except Exception as error:  # a damaged or malicious pickle can raise anything
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as tensors ({reason}): it is damaged or holds code, copy it again"
        ) from None
    return state


def _shards(index: Path) -> list[str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or any(
        not isinstance(name, str) or Path(name).name != name for name in names.values()
    ):
        raise UserError(
            f"{index} has no weight_map of file names beside it: copy the checkpoint again"
        )
    return sorted(set(names.values()))


def _without_weights(directory: Path) -> str:
    pickles = sorted(
        path.name
        for pattern in ("*.bin", "*.pt", "*.pth")
        for path in directory.glob(pattern)
        if "--" not in path.name
    )
    if not pickles:
        return f"{directory} has no {WEIGHTS}: choose another model.checkpoint, or set model.options.random_weights=true"
    convert = f"save_file(torch.load('{pickles[0]}', weights_only=True), '{WEIGHTS}')"
    return (
        f"{directory} has no {WEIGHTS}, only {pickles[0]}, a pickle, which could run code and is not read: convert it there with "
        f'`python -c "import torch; from safetensors.torch import save_file; {convert}"`'
    )


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, unread. Raises UserError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return {
                key: Stored(path, key, torch.Size(file.get_slice(key).get_shape()))
                for key in file.keys()  # noqa: SIM118
            }
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): the file is missing or damaged, copy it again"
        ) from None


def build_device(random_weights: bool) -> torch.device:
    """Return the device to build a network on: meta (no memory), or cpu for random weights."""
    return torch.device("cpu" if random_weights else "meta")


def load_weights(
    module: nn.Module,
    state: State,
    directory: Path,
    dtype_of: Callable[[str], torch.dtype] = lambda name: torch.float32,
) -> dict[str, torch.dtype]:
    """Load weights into ``module``, which may be on meta; return their stored dtypes.

    ``dtype_of(name)``: the dtype in memory. Needs no more memory beside the weights than the
    largest tensor takes. Raises UserError for missing or unexpected keys, other shapes, quantised
    weights, and NaN or infinite values.
    """
    expected = module.state_dict()
    for problem, keys in (
        ("missing", expected.keys() - state.keys()),
        ("unexpected", state.keys() - expected.keys()),
    ):
        if keys:
            raise UserError(
                f"{directory} does not fit its config.json: {len(keys)} {problem} weights, first {min(keys)}"
            )
    for key, value in state.items():
        if value.shape != expected[key].shape:
            raise UserError(
                f"{directory}: {key} has shape {list(value.shape)}, config.json says {list(expected[key].shape)}"
            )
    filled: dict[str, Tensor] = {}
    stored: dict[str, torch.dtype] = {}
    for key, value in state.items():
        tensor = read_weight(key, value, directory)
        stored[key] = tensor.dtype
        # copied: overwriting the memory-mapped file later must not change the network
        filled[key] = tensor.to(dtype_of(key), copy=True)
    module.load_state_dict(filled, assign=True)
    return stored


def read_weight(key: str, value: Tensor | Unread, directory: Path) -> Tensor:
    """Return a weight as it is stored. Raises UserError if it is quantised or not finite."""
    tensor = value if isinstance(value, Tensor) else value.read()
    if (problem := fault(tensor)) is not None:
        raise UserError(f"{directory}: {key} {problem}")
    return tensor


def save(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    directory: Path,
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json and the weights: one safetensors file, or shards and their index.

    Shards have at most SHARD_BYTES, unless one tensor has more. The dtype of a weight is ``dtype``
    if given, else that in ``dtypes``, else bfloat16.
    """
    (directory / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    kinds = {key: dtype or dtypes.get(key, torch.bfloat16) for key in state}
    shards: list[dict[str, Tensor]] = [{}]
    total = room = 0
    for key, value in state.items():
        size = value.numel() * kinds[key].itemsize
        if shards[-1] and room + size > SHARD_BYTES:
            shards.append({})
            room = 0
        shards[-1][key] = value
        total, room = total + size, room + size
    if len(shards) == 1:
        names = [WEIGHTS]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (directory / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n"
        )
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(
            {key: value.to(kinds[key]) for key, value in shard.items()}, directory / name
        )


def write_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    # official loaders reject a file without format metadata
    save_file(
        {key: value.contiguous() for key, value in state.items()}, path, metadata={"format": "pt"}
    )
    path.chmod(0o644)  # safetensors creates files that only their owner can read
