"""Read openpi's own checkpoints, which JAX wrote with orbax, one array at a time.

Sources of names and axes: openpi (1d54897f) ``models/{pi0,gemma,siglip}.py`` and its converter
``examples/convert_jax_model_to_pytorch.py``. Arrays of a stack of layers have the layer as first
axis. Below, ``d`` is the width, ``n`` and ``h`` are heads and their size, ``f`` the hidden width of
an MLP, and ``p`` the patch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.io import read_json

PARAMS, METADATA = "params", "_METADATA"
INSTALL = "pip install 'rlinf-vla[openpi]'"

VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
"""Tied to the text embedding."""
EXPERT = "paligemma_with_expert.gemma_expert.model"
UNUSED_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""In PyTorch checkpoints only; no computation reads it."""

Change = Callable[[Tensor], Tensor]


def _same(array: Tensor) -> Tensor:
    return array


def _transposed(array: Tensor) -> Tensor:
    return array.T


def _first(array: Tensor) -> Tensor:
    return array[0]


def _patches(kernel: Tensor) -> Tensor:
    """``[p, p, 3, d]`` to a convolution's ``[d, 3, p, p]``."""
    return kernel.permute(3, 2, 0, 1)


def _into_heads(kernel: Tensor) -> Tensor:
    """``[d, n, h]`` to ``[n * h, d]``."""
    return kernel.flatten(1).T


def _out_of_heads(kernel: Tensor) -> Tensor:
    """``[n, h, d]`` to ``[d, n * h]``."""
    return kernel.flatten(0, 1).T


def _by_head(einsum: Tensor) -> Tensor:
    """``[n, d, h]`` to ``[n * h, d]``."""
    return einsum.transpose(1, 2).flatten(0, 1)


def _linear(jax: str, ours: str) -> dict[str, dict[str, Change]]:
    return {
        f"{jax}/kernel": {f"{ours}.weight": _transposed},
        f"{jax}/bias": {f"{ours}.bias": _same},
    }


def _layer_norm(jax: str, ours: str) -> dict[str, dict[str, Change]]:
    return {f"{jax}/scale": {f"{ours}.weight": _same}, f"{jax}/bias": {f"{ours}.bias": _same}}


def _siglip() -> dict[str, dict[str, Change]]:
    block = "PaliGemma/img/Transformer/encoderblock"
    layer = f"{VISION}.encoder.layers.{{}}"
    table: dict[str, dict[str, Change]] = {
        "PaliGemma/img/embedding/kernel": {f"{VISION}.embeddings.patch_embedding.weight": _patches},
        "PaliGemma/img/embedding/bias": {f"{VISION}.embeddings.patch_embedding.bias": _same},
        "PaliGemma/img/pos_embedding": {f"{VISION}.embeddings.position_embedding.weight": _first},
        **_layer_norm("PaliGemma/img/Transformer/encoder_norm", f"{VISION}.post_layernorm"),
        **_linear("PaliGemma/img/head", PROJECTOR),
        **_layer_norm(f"{block}/LayerNorm_0", f"{layer}.layer_norm1"),
        **_layer_norm(f"{block}/LayerNorm_1", f"{layer}.layer_norm2"),
        **_linear(f"{block}/MlpBlock_0/Dense_0", f"{layer}.mlp.fc1"),
        **_linear(f"{block}/MlpBlock_0/Dense_1", f"{layer}.mlp.fc2"),
    }
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for jax, ours in {"query": "q_proj", "key": "k_proj", "value": "v_proj"}.items():
        table[f"{attention}/{jax}/kernel"] = {f"{layer}.self_attn.{ours}.weight": _into_heads}
        table[f"{attention}/{jax}/bias"] = {f"{layer}.self_attn.{ours}.bias": torch.flatten}
    table[f"{attention}/out/kernel"] = {f"{layer}.self_attn.out_proj.weight": _out_of_heads}
    table[f"{attention}/out/bias"] = {f"{layer}.self_attn.out_proj.bias": _same}
    return table


def _gemma(suffix: str, ours: str, adaptive: bool) -> dict[str, dict[str, Change]]:
    """``suffix``: of the stream's names; ``adaptive``: whether its norms have a condition."""
    layers = "PaliGemma/llm/layers"
    layer = f"{ours}.layers.{{}}"
    table: dict[str, dict[str, Change]] = {
        f"{layers}/attn/q_einsum{suffix}/w": {f"{layer}.self_attn.q_proj.weight": _by_head},
        f"{layers}/attn/kv_einsum{suffix}/w": {
            f"{layer}.self_attn.k_proj.weight": lambda einsum: _by_head(einsum[0]),
            f"{layer}.self_attn.v_proj.weight": lambda einsum: _by_head(einsum[1]),
        },
        f"{layers}/attn/attn_vec_einsum{suffix}/w": {
            f"{layer}.self_attn.o_proj.weight": _out_of_heads
        },
        f"{layers}/mlp{suffix}/gating_einsum": {
            f"{layer}.mlp.gate_proj.weight": lambda einsum: einsum[0].T,
            f"{layer}.mlp.up_proj.weight": lambda einsum: einsum[1].T,
        },
        f"{layers}/mlp{suffix}/linear": {f"{layer}.mlp.down_proj.weight": _transposed},
    }
    norms = {
        f"{layers}/pre_attention_norm{suffix}": f"{layer}.input_layernorm",
        f"{layers}/pre_ffw_norm{suffix}": f"{layer}.post_attention_layernorm",
        f"PaliGemma/llm/final_norm{suffix}": f"{ours}.norm",
    }
    for jax, norm in norms.items():
        table |= (
            _linear(f"{jax}/Dense_0", f"{norm}.dense")
            if adaptive
            else {f"{jax}/scale": {f"{norm}.weight": _same}}
        )
    return table


def layout(pi05: bool) -> dict[str, dict[str, Change]]:
    """Return JAX's name of each array -> the tensors in it; ``{}`` is the number of the layer."""
    projections = (
        ("time_mlp_in", "time_mlp_out")
        if pi05
        else ("state_proj", "action_time_mlp_in", "action_time_mlp_out")
    )
    table: dict[str, dict[str, Change]] = {
        "PaliGemma/llm/embedder/input_embedding": {LM_HEAD: _same},
        **_siglip(),
    }
    table |= _gemma("", LANGUAGE, adaptive=False) | _gemma("_1", EXPERT, adaptive=pi05)
    for name in ("action_in_proj", "action_out_proj", *projections):
        table |= _linear(name, name)
    return table


@dataclass(frozen=True)
class Part:
    """A tensor of the network inside an array that has not been read."""

    arrays: Arrays
    name: str
    layer: int | None
    change: Change

    def _of(self, array: Tensor) -> Tensor:
        return self.change(array if self.layer is None else array[self.layer])

    @property
    def shape(self) -> torch.Size:
        return self._of(torch.empty(self.arrays.shape(self.name), device="meta")).shape

    def read(self) -> Tensor:
        return self._of(self.arrays.read(self.name)).contiguous()


class Arrays:
    """The arrays of a directory that orbax wrote; the one read last is kept, for its other layers.

    Raises UserError if tensorstore is not installed or the directory is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / PARAMS
        try:
            import tensorstore
        except ImportError:
            raise UserError(
                f"{directory} is a checkpoint of openpi in JAX, which needs tensorstore: {INSTALL}"
            ) from None
        self._tensorstore = tensorstore
        try:
            document = read_json(self.path / METADATA)
            stored = [
                tuple(part["key"] for part in entry["key_metadata"])
                for entry in document["tree_metadata"].values()
            ]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path / METADATA} cannot be read: it is missing or damaged, copy the checkpoint again"
            ) from None
        self._zarr = "zarr3" if document.get("use_zarr3") else "zarr"
        # `params` is the saved item; checkpoints of training add `value` to every name
        depth = -1 if all(name[-1] == "value" for name in stored) else None
        root = 1 if all(name[0] == "params" for name in stored) else 0
        self.stored = {
            "/".join(map(str, name[root:depth])): ".".join(map(str, name)) for name in stored
        }
        self._opened: dict[str, Any] = {}
        self._last: tuple[str, Tensor] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(name).shape)

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            base = {"driver": "file", "path": f"{self.path}/"}
            if (self.path / "manifest.ocdbt").exists():
                store = {"driver": "ocdbt", "base": base, "path": f"{self.stored[name]}/"}
            else:  # written by an older orbax: one folder per array
                store = {"driver": "file", "path": f"{self.path / self.stored[name]}/"}
            self._opened[name] = self._attempt(
                name,
                lambda: self._tensorstore.open({"driver": self._zarr, "kvstore": store}).result(),
            )
        return self._opened[name]

    def read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees its memory first
            array = self._attempt(name, lambda: self._open(name).read().result())
            bits = array.dtype.name == "bfloat16"  # NumPy has no such type
            self._last = (
                name,
                torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
                if bits
                else torch.from_numpy(array),
            )
        return self._last[1]

    def _attempt(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (
            Exception
        ) as error:  # tensorstore raises ValueError for whatever is wrong with a file
            reason = str(error).splitlines()[0][:200]
            raise UserError(
                f"{self.path}: {name} cannot be read ({reason}): the checkpoint is damaged, copy it again"
            ) from None


class JaxCheckpoint:
    """An openpi checkpoint as JAX wrote it. Raises UserError if it is not one of π₀ or π₀.₅."""

    def __init__(self, directory: Path) -> None:
        self.arrays = Arrays(directory)
        keys = self.arrays.stored.keys()
        if "action_in_proj/kernel" not in keys:
            raise UserError(
                f"{directory} is not a π₀ or π₀.₅ (it has no action_in_proj; π₀-FAST is not supported)"
            )
        self.pi05 = "time_mlp_in/kernel" in keys
        self.layout = layout(self.pi05)
        model = "π₀.₅" if self.pi05 else "π₀"
        if adapters := [name for name in keys if "lora" in name]:
            raise UserError(
                f"{directory} holds LoRA adapters (first {min(adapters)}), which are not read: merge them in openpi"
            )
        for problem, names in (
            ("lacks", self.layout.keys() - keys),
            ("has beside those", keys - self.layout.keys()),
        ):
            if names:
                raise UserError(
                    f"{directory} {problem} of openpi's {model}: {len(names)} arrays, first {min(names)}"
                )

    @staticmethod
    def is_one(directory: Path) -> bool:
        return (directory / PARAMS / METADATA).exists()

    @cached_property
    def config(self) -> dict[str, Any]:
        """Sizes as in our config.json, read from shapes; the horizon is in no array."""
        shape = self.arrays.shape
        patch, _, _, width = shape("PaliGemma/img/embedding/kernel")
        block = "PaliGemma/img/Transformer/encoderblock"
        depth, _, heads, _ = shape(f"{block}/MultiHeadDotProductAttention_0/query/kernel")
        vision = {
            "hidden_size": width,
            "intermediate_size": shape(f"{block}/MlpBlock_0/Dense_0/kernel")[2],
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "image_size": isqrt(shape("PaliGemma/img/pos_embedding")[1]) * patch,
            "patch_size": patch,
        }
        return {
            "paligemma": self._gemma(""),
            "action_expert": self._gemma("_1"),
            "vision": vision,
            "vocab_size": shape("PaliGemma/llm/embedder/input_embedding")[0],
            "action_dim": shape("action_in_proj/kernel")[0],
            "pi05": self.pi05,
        }

    def _gemma(self, suffix: str) -> dict[str, int]:
        layers = "PaliGemma/llm/layers"
        shape = self.arrays.shape
        depth, heads, width, size = shape(f"{layers}/attn/q_einsum{suffix}/w")
        return {
            "width": width,
            "depth": depth,
            "mlp_dim": shape(f"{layers}/mlp{suffix}/linear")[1],
            "num_heads": heads,
            "num_kv_heads": shape(f"{layers}/attn/kv_einsum{suffix}/w")[2],
            "head_dim": size,
        }

    def state(self) -> Mapping[str, Tensor | Part]:
        """Return the weights under openpi's PyTorch names, those of an array one after another."""
        weights: dict[str, Tensor | Part] = {}
        for name, tensors in self.layout.items():
            stacked = "{}" in next(iter(tensors))
            for layer in range(self.arrays.shape(name)[0]) if stacked else [None]:
                weights |= {
                    ours.format(layer): Part(self.arrays, name, layer, change)
                    for ours, change in tensors.items()
                }
        width = self.config["action_expert"]["width"]
        weights[UNUSED_HEAD] = torch.zeros(1, 1, dtype=torch.bfloat16).expand(
            self.config["vocab_size"], width
        )
        return weights
