"""What each key of a checkpoint's config.json does here: nothing in it is ignored silently.

A model has one table per layout. A key is read, has no effect, or may have the supported values
alone. A table in a table describes an object. Keys that are in no table are listed in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError, printable


class Use(Enum):
    READ = "read"
    """The policy is built from it."""
    TRAINING = "training"
    """A setting of the training that made the checkpoint."""
    RECORD = "record"
    """Where the checkpoint comes from, how it is published, or which program wrote it."""
    SPEED = "speed"
    """How the official program computes the same numbers, or a part that is switched off."""
    SHAPE = "shape"
    """A size that is checked by the shapes of the weights."""


class Only:
    """The values of a key that are supported. ``missing``: what the official program takes if the
    key is not there; by default, a supported value."""

    def __init__(self, *values: Any, **missing: Any) -> None:
        self.values = values
        self.missing = missing.get("missing", values[0])

    def allows(self, value: Any) -> bool:
        return any(
            value == option and isinstance(value, bool) == isinstance(option, bool)
            for option in self.values
        )


Table = Mapping[str, "Use | Only | Table"]
SHOWN = 220
"""Characters of the keys in a line; a server's client reads no line of more than 300."""


def keys(use: Use, names: str) -> dict[str, Use]:
    """Return the keys in ``names``, which spaces separate, with the same use."""
    return dict.fromkeys(names.split(), use)


def check_keys(node: Mapping[str, Any], table: Table, path: Path) -> list[str]:
    """Return one line on the keys of ``node`` that are not in ``table``, or none.

    ``path``: the file. Raises UserError for a value that is not supported.
    """
    unknown = printable(", ".join(_unknown(node, table, path, "")))
    text = unknown if len(unknown) <= SHOWN else f"{unknown[:SHOWN]} ..."
    return (
        [f"{path.name} has keys that are not known and have no effect: {text}"] if unknown else []
    )


def _unknown(node: Mapping[str, Any], table: Table, path: Path, prefix: str) -> Iterator[str]:
    for name, use in table.items():
        value = node.get(name, use.missing) if isinstance(use, Only) else node.get(name)
        if isinstance(use, Only) and not use.allows(value):
            text = json.dumps(value)[:60]
            expected = " or ".join(json.dumps(option) for option in use.values)
            raise UserError(
                f"{path}: {prefix}{name}={text} is not supported, {expected} is: choose another model.checkpoint"
            )
        if isinstance(use, Mapping) and isinstance(value, dict):
            yield from _unknown(value, use, path, f"{prefix}{name}.")
    yield from (f"{prefix}{name}" for name in node if name not in table)


TRANSFORMERS: Table = {
    **keys(
        Use.RECORD,
        "_attn_implementation_autoset _commit_hash _name_or_path architectures auto_map finetuning_task name_or_path tokenizer_class "
        "transformers_version",
    ),
    **keys(
        Use.TRAINING,
        "problem_type task_specific_params id2label label2id num_labels tf_legacy_loss gradient_checkpointing",
    ),
    **keys(
        Use.SPEED,
        "_attn_implementation _attn_implementation_internal attn_implementation chunk_size_feed_forward dtype model_dtype compute_dtype "
        "torch_dtype torchscript use_bfloat16 use_cache return_dict return_dict_in_generate output_attentions output_hidden_states "
        "output_scores pruned_heads",
    ),
    # how transformers' generate samples text; a policy here decodes its own tokens
    **keys(
        Use.SPEED,
        "bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping "
        "encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length "
        "min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences prefix remove_invalid_values "
        "repetition_penalty sep_token_id suppress_tokens temperature top_k top_p typical_p",
    ),
    **keys(
        Use.SPEED,
        "add_cross_attention cross_attention_hidden_size is_decoder is_encoder_decoder tie_encoder_decoder",
    ),
}
"""Keys that transformers writes into any model's config.json; each has no effect on a policy."""
