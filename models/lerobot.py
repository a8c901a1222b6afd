"""Read the statistics of a policy in lerobot's layout.

Sources: lerobot (7427f318) ``processor/normalize_processor.py`` and ``processor/pipeline.py``; for
directories without processor files its version of February 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError

from .files import Stored, Unread, read_json, read_safetensors, read_weights

FEATURES = {"state": "observation.state", "actions": "action"}
PROCESSORS = {
    "state": ("policy_preprocessor.json", "normalizer_processor"),
    "actions": ("policy_postprocessor.json", "unnormalizer_processor"),
}
"""What is normalised -> the file of its pipeline, and the step's name there."""
BUFFERS = {"state": "normalize_inputs.buffer_observation_state.", "actions": "unnormalize_outputs.buffer_action."}
"""The same -> the prefix of its statistics among the weights, before there were processor files."""
BUFFER_PREFIXES = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
KINDS = {"state": "STATE", "actions": "ACTION"}


def has_processors(directory: Path) -> bool:
    """Return whether its statistics are in files of their own, and not among the weights."""
    return all((directory / file).exists() for file, _ in PROCESSORS.values())


def read_statistics(directory: Path, document: Mapping[str, Any], other_remedy: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``norm_stats`` as openpi has them, and ``normalization``: a mode of each, ``epsilon``.

    Raises UserError if the checkpoint has none, as base models; ``other_remedy`` ends its message.
    """
    statistics: dict[str, Any] = {}
    normalization: dict[str, Any] = {"epsilon": 1e-8}
    weights: Mapping[str, Unread] | None = None
    tensors: Mapping[str, Unread]
    for name, (file, step_name) in PROCESSORS.items():
        if (directory / file).exists():
            step = _step(directory / file, step_name)
            tensors = _tensors(directory, step.get("state_file"))
            prefix, config = f"{FEATURES[name]}.", step.get("config", {})
            modes, normalization["epsilon"] = config.get("norm_map", {}), config.get("eps", 1e-8)
        else:
            tensors = weights = read_weights(directory) if weights is None else weights
            prefix, modes = BUFFERS[name], document.get("normalization_mapping", {})
        found = {key.removeprefix(prefix): value.read().tolist() for key, value in tensors.items() if key.startswith(prefix)}
        # lerobot initialises buffers that were never set with infinity
        if not found or not all(math.isfinite(number) for values in found.values() for number in values):
            raise UserError(
                f"{directory} has no statistics of its {name}, as lerobot's base models: choose a fine-tuned checkpoint{other_remedy}"
            )
        statistics[name], normalization[name] = found, modes.get(KINDS[name], "IDENTITY")
    return statistics, normalization


def _step(path: Path, name: str) -> dict[str, Any]:
    steps = read_json(path).get("steps")
    found = [step for step in steps if isinstance(step, dict) and step.get("registry_name") == name] if isinstance(steps, list) else []
    if len(found) != 1:
        raise UserError(f"{path} has {len(found)} steps {name}, one is expected: copy the checkpoint again")
    return found[0]


def _tensors(directory: Path, file: Any) -> Mapping[str, Stored]:
    """Return the statistics of a step; none if it has no file."""
    if file is None:
        return {}
    if not isinstance(file, str) or Path(file).name != file:
        raise UserError(f"{directory}: state_file={file} is not the name of a file there: copy the checkpoint again")
    return read_safetensors(directory / file)
