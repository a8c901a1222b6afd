"""Read a checkpoint's config.json and check its sizes before anything is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import Range

from .files import CONFIG, read_json

SIZES = {
    **dict.fromkeys(("hidden_size", "embed_dim", "width", "head_dim"), Range(1, 16_384)),
    **dict.fromkeys(
        ("input_embedding_dim", "backbone_embedding_dim", "cross_attention_dim", "output_dim"),
        Range(1, 16_384),
    ),
    **dict.fromkeys(("num_layers", "select_layer"), Range(1, 256)),
    **dict.fromkeys(
        (
            "attention_head_dim",
            "num_target_vision_tokens",
            "max_num_embodiments",
            "num_inference_timesteps",
        ),
        Range(1, 4096),
    ),
    **dict.fromkeys(("max_seq_len", "num_timestep_buckets"), Range(1, 65_536)),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "n_action_bins"), Range(1, 65_536)),
    **dict.fromkeys(("num_hidden_layers", "depth"), Range(1, 256)),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads"), Range(1, 512)
    ),
    **dict.fromkeys(("vocab_size", "pad_to_multiple_of"), Range(0, 2**20)),
    **dict.fromkeys(
        ("image_size", "img_size", "image_sizes", "patch_size", "patch", "scale_factor"),
        Range(1, 4096),
    ),
    **dict.fromkeys(("tokenizer_max_length", "num_steps", "num_inference_steps"), Range(1, 4096)),
    **dict.fromkeys(("chunk", "chunk_size", "n_action_steps", "action_horizon"), Range(1, 1024)),
    **dict.fromkeys(
        ("action_dim", "max_action_dim", "max_state_dim", "state_dim", "channels"), Range(1, 4096)
    ),
    "reg_tokens": Range(0, 1024),
}
"""Ranges of integers in config.json, at any depth; they admit the largest published models, and
exclude sizes that would take minutes to build."""

LISTS = {"image_sizes": 2, "channels": None}
"""Entries of SIZES that are lists -> their length; None: any length but zero."""

SHARES = {
    "mlp_ratio": Range(0, 64, above=True),
    "embedding_std": Range(0, 1000),
    "expert_width_multiplier": Range(0, 64, above=True),
} | {
    **dict.fromkeys(("min_period", "max_period"), Range(0, 1000, above=True)),
}
OPTIONAL = ("head_dim", "num_key_value_heads", "pad_to_multiple_of")
"""Keys that official files may set to null, where another key determines the value."""

NODES = (
    *(
        "text_config",
        "vision_config",
        "featurizer",
        "fused_featurizer",
        "oft",
        "vision",
        "paligemma",
        "action_expert",
        "state_range",
    ),
    *("backbone_cfg", "action_head_cfg", "diffusion_model_cfg", "vl_self_attention_cfg"),
)


def read_config(directory: Path) -> dict[str, Any]:
    """Read and check config.json. Raises UserError naming file and key if a value is not valid."""
    document = read_json(directory / CONFIG)
    try:
        check_sizes(document, directory / CONFIG)
    except RecursionError:
        raise UserError(
            f"{directory / CONFIG} is nested too deeply: copy the checkpoint again"
        ) from None
    return document


def check_sizes(node: dict[str, Any], path: Path, prefix: str = "") -> None:
    """Check the sizes in ``node``, a part of the JSON file ``path``. Raises UserError."""
    for name, value in node.items():
        expected = _wanted(name, value)
        if expected is not None:
            text = json.dumps(value)
            raise UserError(
                f"{path}: {prefix}{name}={text[:60]} is not valid, {expected} is expected: copy the checkpoint again"
            )
        if isinstance(value, dict) and name != "norm_stats":  # its keys are dataset names
            check_sizes(value, path, f"{prefix}{name}.")


def _wanted(name: str, value: Any) -> str | None:
    """Describe the value that ``name`` needs; None if ``value`` is valid or not checked."""
    if name in NODES:
        return None if isinstance(value, dict) else "an object"
    if name in SHARES:
        return None if SHARES[name].allows(value) else str(SHARES[name])
    if name not in SIZES or (value is None and name in OPTIONAL):
        return None
    if name in LISTS:
        right = isinstance(value, list) and len(value) == (LISTS[name] or max(len(value), 1))
        return (
            None
            if right and all(_is_size(name, size) for size in value)
            else f"a list of {LISTS[name] or ''} sizes".replace("  ", " ")
        )
    return None if _is_size(name, value) else f"a whole {str(SIZES[name]).removeprefix('a ')}"


def _is_size(name: str, value: Any) -> bool:
    return isinstance(value, int) and SIZES[name].allows(value)


@contextmanager
def building_errors(directory: Path, *names: str) -> Iterator[None]:
    """Turn any error while building a model from the checkpoint files ``names`` into a UserError.

    Catches every Exception, because the libraries that build layers raise nothing more specific.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (
            f"there is no {error}"
            if isinstance(error, KeyError)
            else f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"
        )
        raise UserError(
            f"{directory}: no model can be built from {' and '.join(names)} ({reason}): copy the checkpoint again"
        ) from error
