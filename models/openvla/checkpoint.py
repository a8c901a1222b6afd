"""Read the statistics, conventions and extra components of OpenVLA(-OFT) checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rlinf_vla.config.errors import UserError

from ..cards import Card
from ..files import State, read_json, read_pickle, read_safetensors
from ..options import GRIPPERS
from .actions import BOUNDS
from .cards import suite_key

STATISTICS = "dataset_statistics.json"
CONVENTIONS: dict[str, tuple[Any, ...]] = {
    "center_crop": (False, True),
    "resize": ("processor", "rlds"),
    "gripper": tuple(GRIPPERS),
    "bounds": tuple(BOUNDS),
}
"""``model.options`` that must match the training of a checkpoint -> their choices."""
COMPONENTS = {
    "action_head": ("head", "l1"),
    "proprio_projector": ("proprio", True),
    "vision_backbone": ("film", True),
}
"""Parts of an OpenVLA-OFT in files of their own -> the option that uses it, and its value."""
_SUFFIX = "_checkpoint.pt"


class Dataset(NamedTuple):
    """What the actions of a policy are un-normalised as."""

    name: str
    statistics: dict[str, Any]
    inherited: bool
    """It is not of a fine-tune's own data, but of its base model's."""


def read_statistics(
    directory: Path, config: dict[str, Any], key: str | None, card: Card | None
) -> Dataset:
    """Return the dataset that actions are un-normalised as.

    Datasets are those of ``norm_stats`` in config.json and of a fine-tune's
    dataset_statistics.json, whose statistics win. ``key`` chooses one. None selects the card's, if
    the fine-tune's data is known to the card; else, first of dataset_statistics.json and then of
    both, that of the LIBERO suite in the repository's name, or the only one. Raises UserError if
    ``key`` is missing or ambiguous.
    """
    path = directory / STATISTICS
    own = read_json(path) if path.exists() else {}
    statistics = {**(config.get("norm_stats") or {}), **own}
    if (
        key is None
        and card is not None
        and card.dataset in statistics
        and (not own or card.tools.keys() & own)
    ):
        key = card.dataset
    for source in (own, statistics):
        key = (
            key
            or suite_key(directory, source)
            or (next(iter(source)) if len(source) == 1 else None)
        )
    if key is None or key not in statistics:
        raise UserError(
            f"model.options.unnorm_key={key}: {directory} has statistics for {sorted(statistics)}, choose one"
        )
    return Dataset(key, statistics[key], inherited=bool(own) and key not in own)


def read_conventions(directory: Path, config: dict[str, Any], options: Any) -> dict[str, Any]:
    """Resolve CONVENTIONS: from the recipe, else config.json (ours), else the official defaults.

    The official fine-tuning scripts train on random crops of RLDS images. Their checkpoints are
    recognised by the base model's ``norm_stats`` in config.json together with a
    dataset_statistics.json. Base models use their processor only. Raises UserError.
    """
    fine_tune = bool(config.get("norm_stats")) and (directory / STATISTICS).exists()
    official = {
        "center_crop": fine_tune,
        "resize": "rlds" if fine_tune else "processor",
        "gripper": "raw",
        "bounds": "q99",
    }
    conventions = {}
    for name, choices in CONVENTIONS.items():
        option = getattr(options, name)
        conventions[name] = config.get(name, official[name]) if option is None else option
        if conventions[name] not in choices:
            raise UserError(
                f"model.options.{name}={conventions[name]}: choose {' or '.join(map(str, choices))}"
            )
    return conventions


def component_files(directory: Path) -> dict[str, Path]:
    """Return COMPONENTS of a directory: openvla-oft's ``NAME--STEP_checkpoint.pt`` or, which wins,
    our ``NAME.safetensors``.

    Of several steps the latest counts. Raises UserError if a component lacks it, and for components
    of no policy here.
    """
    components: dict[str, dict[str, Path]] = {}
    for path in directory.glob(f"*--*{_SUFFIX}"):
        name, _, step = path.name.removesuffix(_SUFFIX).partition("--")
        components.setdefault(name, {})[step] = path
    if unknown := sorted(components.keys() - COMPONENTS.keys()):
        file = next(iter(components[unknown[0]].values())).name
        raise UserError(
            f"{directory}: {file} is a part of another head (diffusion), which is not supported: choose another checkpoint"
        )
    ours = {
        name: path for name in COMPONENTS if (path := directory / f"{name}.safetensors").exists()
    }
    steps = {name: of for name, of in components.items() if name not in ours}
    latest = max({step for of in steps.values() for step in of}, key=_order, default="")
    for name, of in steps.items():
        if latest not in of:
            raise UserError(
                f"{directory} has parts of step {latest}, but {name} only of {max(of, key=_order)}: keep the files of one step"
            )
    return {name: of[latest] for name, of in steps.items()} | ours


def read_component(path: Path) -> State:
    """Read a component. Pickles are loaded with ``weights_only=True``, so no code of the checkpoint
    runs. Raises UserError if the file cannot be read."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return {key.removeprefix("module."): value for key, value in read_pickle(path).items()}


def _order(step: str) -> float:
    """Return the training step; ``latest`` sorts last."""
    return float(step) if step.isdigit() else float("inf")
