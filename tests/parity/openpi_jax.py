"""Small random models in the layout of openpi's JAX checkpoints, and openpi's forward pass in NumPy.

The einsums and axes are those of openpi's ``gemma.py``, ``siglip.py`` and ``pi0.py``; nothing here
knows the PyTorch network. ``python -m tests.parity.openpi_jax DIRECTORY`` writes the fixtures
``openpi_orbax`` with orbax itself (``pip install orbax-checkpoint``).
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

WIDTH = 16
EXPERT = 10
HEADS = 4
KV_HEADS = 2
HEAD = 6
MLP = 22
EXPERT_MLP = 14
DEPTH = 2
"""Of one array no two are equal, so that a wrong axis of it is a wrong shape."""
VISION = 12
VISION_HEADS = 4
VISION_MLP = 20
VISION_DEPTH = 2
PATCH = 2
PATCHES = 16
VOCABULARY, ACTIONS, HORIZON = 512, 8, 7
BLOCK = "PaliGemma/img/Transformer/encoderblock"
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_0"
LAYERS = "PaliGemma/llm/layers"


def shapes(pi05: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "PaliGemma/img/embedding/kernel": (PATCH, PATCH, 3, VISION),
        "PaliGemma/img/embedding/bias": (VISION,),
        "PaliGemma/img/pos_embedding": (1, PATCHES, VISION),
        "PaliGemma/img/head/kernel": (VISION, WIDTH),
        "PaliGemma/img/head/bias": (WIDTH,),
        f"{BLOCK}/MlpBlock_0/Dense_0/kernel": (VISION_DEPTH, VISION, VISION_MLP),
        f"{BLOCK}/MlpBlock_0/Dense_0/bias": (VISION_DEPTH, VISION_MLP),
        f"{BLOCK}/MlpBlock_0/Dense_1/kernel": (VISION_DEPTH, VISION_MLP, VISION),
        f"{BLOCK}/MlpBlock_0/Dense_1/bias": (VISION_DEPTH, VISION),
        f"{ATTENTION}/out/kernel": (VISION_DEPTH, VISION_HEADS, VISION // VISION_HEADS, VISION),
        f"{ATTENTION}/out/bias": (VISION_DEPTH, VISION),
        "PaliGemma/llm/embedder/input_embedding": (VOCABULARY, WIDTH),
    }
    for part in ("scale", "bias"):
        found[f"PaliGemma/img/Transformer/encoder_norm/{part}"] = (VISION,)
        found |= {f"{BLOCK}/LayerNorm_{i}/{part}": (VISION_DEPTH, VISION) for i in (0, 1)}
    for name in ("query", "key", "value"):
        found[f"{ATTENTION}/{name}/kernel"] = (
            VISION_DEPTH,
            VISION,
            VISION_HEADS,
            VISION // VISION_HEADS,
        )
        found[f"{ATTENTION}/{name}/bias"] = (VISION_DEPTH, VISION_HEADS, VISION // VISION_HEADS)
    for suffix, width, mlp in (("", WIDTH, MLP), ("_1", EXPERT, EXPERT_MLP)):
        found[f"{LAYERS}/attn/q_einsum{suffix}/w"] = (DEPTH, HEADS, width, HEAD)
        found[f"{LAYERS}/attn/kv_einsum{suffix}/w"] = (DEPTH, 2, KV_HEADS, width, HEAD)
        found[f"{LAYERS}/attn/attn_vec_einsum{suffix}/w"] = (DEPTH, HEADS, HEAD, width)
        found[f"{LAYERS}/mlp{suffix}/gating_einsum"] = (DEPTH, 2, width, mlp)
        found[f"{LAYERS}/mlp{suffix}/linear"] = (DEPTH, mlp, width)
        norms = {
            f"{LAYERS}/{name}{suffix}": (DEPTH,) for name in ("pre_attention_norm", "pre_ffw_norm")
        }
        for name, stack in (norms | {f"PaliGemma/llm/final_norm{suffix}": ()}).items():
            if pi05 and suffix:
                found |= {
                    f"{name}/Dense_0/kernel": (*stack, width, 3 * width),
                    f"{name}/Dense_0/bias": (*stack, 3 * width),
                }
            else:
                found[f"{name}/scale"] = (*stack, width)
    linear = {"action_in_proj": (ACTIONS, EXPERT), "action_out_proj": (EXPERT, ACTIONS)}
    if pi05:
        linear |= {"time_mlp_in": (EXPERT, EXPERT), "time_mlp_out": (EXPERT, EXPERT)}
    else:
        linear |= {
            "state_proj": (ACTIONS, EXPERT),
            "action_time_mlp_in": (2 * EXPERT, EXPERT),
            "action_time_mlp_out": (EXPERT, EXPERT),
        }
    for name, shape in linear.items():
        found |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    return found


def random_arrays(pi05: bool) -> Arrays:
    """The same ones in every process: each is drawn from a generator of its name."""
    found = {}
    for name, shape in shapes(pi05).items():
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        found[name] = generator.normal(scale=0.3, size=shape).astype(np.float32)
    return found


def images_of(arrays: Arrays, pixels: NDArray[Any]) -> NDArray[Any]:
    """SigLIP and the projection to PaliGemma; ``pixels``: ``[B, H, W, 3]`` in [-1, 1]."""
    batch = len(pixels)
    side = pixels.shape[1] // PATCH
    patches = pixels.reshape(batch, side, PATCH, side, PATCH, 3)
    x = np.einsum("bypxqc,pqcd->byxd", patches, arrays["PaliGemma/img/embedding/kernel"]).reshape(
        batch, side * side, -1
    )
    x = x + arrays["PaliGemma/img/embedding/bias"] + arrays["PaliGemma/img/pos_embedding"]
    for i in range(VISION_DEPTH):
        block = {
            name.removeprefix(f"{BLOCK}/"): value[i]
            for name, value in arrays.items()
            if name.startswith(BLOCK)
        }
        attention = "MultiHeadDotProductAttention_0"
        normed = layer_norm(x, block["LayerNorm_0/scale"], block["LayerNorm_0/bias"])
        q, k, v = (
            np.einsum("btd,dnh->btnh", normed, block[f"{attention}/{name}/kernel"])
            + block[f"{attention}/{name}/bias"]
            for name in ("query", "key", "value")
        )
        weights = softmax(np.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5)
        heads = np.einsum("bnts,bsnh->btnh", weights, v)
        x = (
            x
            + np.einsum("btnh,nhd->btd", heads, block[f"{attention}/out/kernel"])
            + block[f"{attention}/out/bias"]
        )
        normed = layer_norm(x, block["LayerNorm_1/scale"], block["LayerNorm_1/bias"])
        hidden = gelu(
            normed @ block["MlpBlock_0/Dense_0/kernel"] + block["MlpBlock_0/Dense_0/bias"]
        )
        x = x + hidden @ block["MlpBlock_0/Dense_1/kernel"] + block["MlpBlock_0/Dense_1/bias"]
    norm = "PaliGemma/img/Transformer/encoder_norm"
    x = layer_norm(x, arrays[f"{norm}/scale"], arrays[f"{norm}/bias"])
    return x @ arrays["PaliGemma/img/head/kernel"] + arrays["PaliGemma/img/head/bias"]


def velocity(
    arrays: Arrays,
    pixels: NDArray[Any],
    tokens: NDArray[Any],
    state: NDArray[Any],
    x: NDArray[Any],
    time: float,
) -> NDArray[Any]:
    """``v(x, t)`` of a batch without padding; one image, both streams in one pass."""
    pi05 = "time_mlp_in/kernel" in arrays
    text = arrays["PaliGemma/llm/embedder/input_embedding"][tokens] * WIDTH**0.5
    prefix = np.concatenate([images_of(arrays, pixels), text], axis=1)
    fraction = np.linspace(0.0, 1.0, EXPERT // 2)
    angle = time / (4e-3 * (4.0 / 4e-3) ** fraction) * 2 * np.pi
    embedded = np.broadcast_to(np.concatenate([np.sin(angle), np.cos(angle)]), (len(x), EXPERT))
    actions = dense(arrays, "action_in_proj", x)
    condition = None
    if pi05:
        condition = silu(
            dense(arrays, "time_mlp_out", silu(dense(arrays, "time_mlp_in", embedded)))
        )
        suffix = actions
    else:
        mixed = np.concatenate([actions, np.repeat(embedded[:, None], HORIZON, axis=1)], axis=-1)
        mixed = dense(
            arrays, "action_time_mlp_out", silu(dense(arrays, "action_time_mlp_in", mixed))
        )
        suffix = np.concatenate([dense(arrays, "state_proj", state)[:, None], mixed], axis=1)
    starts = [0] * prefix.shape[1] + [1] + ([] if pi05 else [1]) + [0] * (HORIZON - 1)
    blocks = np.cumsum(starts)
    visible = blocks[None, :] <= blocks[:, None]
    out = gemma(arrays, [prefix, suffix], visible, condition)
    return dense(arrays, "action_out_proj", out[:, -HORIZON:])


def gemma(
    arrays: Arrays,
    streams: list[NDArray[Any]],
    visible: NDArray[Any],
    condition: NDArray[Any] | None,
) -> NDArray[Any]:
    """The expert's last states of a joint pass through both streams."""
    ends = [0, streams[0].shape[1], streams[0].shape[1] + streams[1].shape[1]]
    for i in range(DEPTH):
        layer = {
            name.removeprefix(f"{LAYERS}/"): value[i]
            for name, value in arrays.items()
            if name.startswith(LAYERS)
        }
        queries = []
        keys = []
        values = []
        gates = []
        for suffix, x in zip(("", "_1"), streams, strict=True):
            normed, gate = rms_norm(
                layer, f"pre_attention_norm{suffix}", x, condition if suffix else None
            )
            queries.append(np.einsum("btd,ndh->btnh", normed, layer[f"attn/q_einsum{suffix}/w"]))
            k, v = np.einsum("bsd,ckdh->cbskh", normed, layer[f"attn/kv_einsum{suffix}/w"])
            keys.append(k)
            values.append(v)
            gates.append(gate)
        q, k, v = (np.concatenate(each, axis=1) for each in (queries, keys, values))
        q = rope(q) * HEAD**-0.5
        k = rope(k)
        q = q.reshape(*q.shape[:2], KV_HEADS, HEADS // KV_HEADS, HEAD)
        logits = np.where(visible, np.einsum("btkgh,bskh->bkgts", q, k), -1e30)
        heads = np.einsum("bkgts,bskh->btkgh", softmax(logits), v)
        heads = heads.reshape(*heads.shape[:2], HEADS, HEAD)
        after = []
        for j, (suffix, x) in enumerate(zip(("", "_1"), streams, strict=True)):
            attended = np.einsum(
                "btnh,nhd->btd",
                heads[:, ends[j] : ends[j + 1]],
                layer[f"attn/attn_vec_einsum{suffix}/w"],
            )
            x = x + gates[j] * attended
            normed, gate = rms_norm(
                layer, f"pre_ffw_norm{suffix}", x, condition if suffix else None
            )
            gating = layer[f"mlp{suffix}/gating_einsum"]
            after.append(
                x
                + gate
                * ((gelu(normed @ gating[0]) * (normed @ gating[1])) @ layer[f"mlp{suffix}/linear"])
            )
        streams = after
    return rms_norm(arrays, "PaliGemma/llm/final_norm_1", streams[1], condition)[0]


def rms_norm(
    arrays: Arrays, name: str, x: NDArray[Any], condition: NDArray[Any] | None
) -> tuple[NDArray[Any], NDArray[Any]]:
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    if condition is None:
        return normed * (1 + arrays[f"{name}/scale"]), np.ones(1)
    scale, shift, gate = np.split(dense(arrays, f"{name}/Dense_0", condition)[:, None], 3, axis=-1)
    return normed * (1 + scale) + shift, gate


def rope(x: NDArray[Any]) -> NDArray[Any]:
    """``[B, T, n, h]``, at positions 0, 1, ..."""
    period = 10_000 ** (2 / x.shape[-1] * np.arange(x.shape[-1] // 2))
    angle = np.arange(x.shape[1])[:, None, None] / period
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ],
        axis=-1,
    )


def dense(arrays: Arrays, name: str, x: NDArray[Any]) -> NDArray[Any]:
    return x @ arrays[f"{name}/kernel"] + arrays[f"{name}/bias"]


def layer_norm(x: NDArray[Any], scale: NDArray[Any], bias: NDArray[Any]) -> NDArray[Any]:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-6) * scale + bias


def softmax(x: NDArray[Any]) -> NDArray[Any]:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def gelu(x: NDArray[Any]) -> NDArray[Any]:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x: NDArray[Any]) -> NDArray[Any]:
    return x / (1 + np.exp(-x))


def main() -> None:
    """Write one folder as openpi's training does (names end in ``value``), one as it publishes."""
    from orbax.checkpoint import PyTreeCheckpointer

    for name, pi05 in (("pi0", False), ("pi05", True)):
        tree: dict[str, Any] = {}
        for path, array in random_arrays(pi05).items():
            *parents, last = ("params", *path.split("/"), *(() if pi05 else ("value",)))
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = array
        with PyTreeCheckpointer() as checkpointer:
            checkpointer.save((Path(sys.argv[1]) / name / "params").absolute(), tree)


if __name__ == "__main__":
    main()
