"""Read the statistics, processors and common keys of a policy in lerobot's layout.

Sources: lerobot (7427f318) ``configs/policies.py``, ``processor/normalize_processor.py`` and
``processor/pipeline.py``; for directories without processor files its version of February 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_vla.config.errors import UserError

from .config_keys import Only, Table, Use, keys
from .files import CONFIG, Stored, Unread, read_json, read_safetensors, read_weights

FEATURES = {"state": "observation.state", "actions": "action"}
PROCESSORS = {
    "state": ("policy_preprocessor.json", "normalizer_processor"),
    "actions": ("policy_postprocessor.json", "unnormalizer_processor"),
}
"""What is normalised -> the file of its pipeline, and the step's name there."""
BUFFERS = {
    "state": "normalize_inputs.buffer_observation_state.",
    "actions": "unnormalize_outputs.buffer_action.",
}
"""The same -> the prefix of its statistics among the weights, before there were processor files."""
BUFFER_PREFIXES = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
KINDS = {"state": "STATE", "actions": "ACTION"}
RELATIVE = ("relative_actions_processor", "delta_actions_processor", "absolute_actions_processor")
STEPS = (
    *(
        "rename_observations_processor",
        "to_batch_processor",
        "device_processor",
        "tokenizer_processor",
    ),
    *(
        "normalizer_processor",
        "unnormalizer_processor",
        "pi0_new_line_processor",
        "smolvla_new_line_processor",
    ),
    *("pi05_prepare_state_tokenizer_processor_step", *RELATIVE),
)
"""Steps of its processors whose work the policies do."""
KEYS: Table = {
    **keys(
        Use.READ,
        "type chunk_size n_action_steps max_action_dim input_features output_features min_period max_period",
    ),
    "normalization_mapping": {"VISUAL": Only("IDENTITY"), "STATE": Use.READ, "ACTION": Use.READ},
    "n_obs_steps": Only(1),
    "use_peft": Only(False),
    "adapt_to_pi_aloha": Only(False),
    "use_delta_joint_actions_aloha": Only(False),
    "max_state_dim": Use.SHAPE,
    # slots of empty cameras and of padding are masked: they change nothing
    **keys(
        Use.SPEED,
        "empty_cameras tokenizer_max_length device use_amp use_cache compile_model compile_mode rtc_config",
    ),
    **keys(
        Use.RECORD, "push_to_hub repo_id private tags license pretrained_path pretrained_revision"
    ),
    **keys(
        Use.TRAINING,
        "freeze_vision_encoder train_expert_only train_state_proj optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay "
        "optimizer_grad_clip_norm scheduler_warmup_steps scheduler_decay_steps scheduler_decay_lr gradient_checkpointing",
    ),
}
"""Keys of config.json that π₀, π₀.₅ and SmolVLA have in common."""
OTHER = "choose another model.checkpoint"


def check_cameras(directory: Path, document: Mapping[str, Any], images: list[str] | None) -> None:
    """Raise UserError if a policy of several cameras is not told which ones they are here.

    lerobot gives a camera that a data set lacks the name ``empty_camera``.
    """
    features = document.get("input_features") or {}
    visual = [
        name
        for name, feature in features.items()
        if feature.get("type") == "VISUAL" and "empty_camera" not in name
    ]
    if images is None and len(visual) > 1:
        raise UserError(
            f"{directory} was trained with {', '.join(visual)}: set model.options.images to cameras in this order"
        )


def check_dimensions(
    directory: Path, document: Mapping[str, Any], state: int, actions: int
) -> None:
    """Raise UserError if the statistics are not of the features in config.json, or too many.

    A feature that config.json pads has the padded size.
    """
    for key, name, most, count in (
        ("input_features", "observation.state", "max_state_dim", state),
        ("output_features", "action", "max_action_dim", actions),
    ):
        padded = document.get(most, count)
        shape = ((document.get(key) or {}).get(name) or {}).get("shape", [count])
        if count > padded or shape not in ([count], [padded]):
            problem = f"{name} has shape {shape}, and {most}={padded}"
            raise UserError(
                f"{directory / CONFIG}: {problem}, but the statistics have {count} numbers: copy the checkpoint again"
            )


def has_processors(directory: Path) -> bool:
    """Return whether its statistics are in files of their own, and not among the weights."""
    return all((directory / file).exists() for file, _ in PROCESSORS.values())


def read_statistics(
    directory: Path, document: Mapping[str, Any], other_remedy: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
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
            prefix = f"{FEATURES[name]}."
            config = step.get("config", {})
            modes = config.get("norm_map", {})
            normalization["epsilon"] = config.get("eps", 1e-8)
        else:
            tensors = weights = read_weights(directory) if weights is None else weights
            prefix = BUFFERS[name]
            modes = document.get("normalization_mapping", {})
        stored = {
            key.removeprefix(prefix): value.read()
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        # lerobot initialises buffers that were never set with infinity
        if not stored or any(value.isinf().all() for value in stored.values()):
            raise UserError(
                f"{directory} has no statistics of its {name}, as lerobot's base models: choose a fine-tuned checkpoint{other_remedy}"
            )
        if modes.get("VISUAL", "IDENTITY") != "IDENTITY":
            raise UserError(
                f"{directory}: normalisation {modes['VISUAL']} of images is not supported, IDENTITY is: {OTHER}"
            )
        statistics[name] = {key: value.tolist() for key, value in stored.items()}
        normalization[name] = modes.get(KINDS[name], "IDENTITY")
    return statistics, normalization


def processor_remarks(directory: Path, relative: bool) -> list[str]:
    """Return a line on steps of the processors that are not known, or none.

    Raises UserError if they make actions relative where config.json does not, or the reverse.
    """
    unknown = []
    for file, _ in PROCESSORS.values():
        for step in _steps(directory / file) if (directory / file).exists() else []:
            name = step.get("registry_name")
            config = step.get("config") or {}
            if name in RELATIVE and bool(config.get("enabled")) != relative:
                raise UserError(
                    f"{directory / file}: {name} is not as use_relative_actions of {CONFIG} says: make them agree"
                )
            unknown += [] if name in STEPS else [str(name or step.get("class"))[:40]]
    return (
        [f"the processors have steps that are not known and are left out: {', '.join(unknown[:5])}"]
        if unknown
        else []
    )


def _steps(path: Path) -> list[dict[str, Any]]:
    steps = read_json(path).get("steps")
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _step(path: Path, name: str) -> dict[str, Any]:
    steps = [step for step in _steps(path) if step.get("registry_name") == name]
    if len(steps) != 1:
        raise UserError(
            f"{path} has {len(steps)} steps {name}, one is expected: copy the checkpoint again"
        )
    return steps[0]


def _tensors(directory: Path, file: Any) -> Mapping[str, Stored]:
    """Return the statistics of a step; none if it has no file."""
    if file is None:
        return {}
    if not isinstance(file, str) or Path(file).name != file:
        raise UserError(
            f"{directory}: state_file={file} is not the name of a file there: copy the checkpoint again"
        )
    return read_safetensors(directory / file)
