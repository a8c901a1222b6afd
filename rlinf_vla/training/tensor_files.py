"""Write and read tensors of any size as safetensors files, one tensor at a time.

The library's ``save_file`` needs all tensors at once, and ``load_file`` reads all. Of a 7B network
that is trained whole, weights, masters and moments are 105 GB. Format:
github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rlinf_vla.training.ranks import Spread

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_parts(spread: Spread, parts: Iterator[tuple[str, Tensor]], path: Path) -> None:
    """Write ``parts``, which are those of ``spread``."""
    header = {}
    end = 0
    for name, (dtype, shape) in spread.described().items():
        begin = end
        end += shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, whole in parts:
            numbers = whole.detach().cpu().contiguous().reshape(-1)
            file.write(numbers.view(torch.uint8).numpy().data)
    path.chmod(0o644)


class Stored(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for."""

    def __init__(self, file: safe_open) -> None:
        self._file = file
        self._names = list(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def opened(path: Path) -> Iterator[Stored]:
    with safe_open(path, "pt") as file:
        yield Stored(file)
