"""Choose what a run, a model directory or a dataset shares with others.

Only files of these lists are shared: no optimiser state, transitions, logs, videos of runs, code or
pickles. Paths of this machine and secrets are removed from JSON and from the recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import flat
from rlinf_vla.core.io import digest, read_document, step_of
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.runtime.recipes import ASSET, HUB
from rlinf_vla.runtime.run_directory import CHECKPOINTS, RECIPE, saved_recipe
from rlinf_vla.runtime.saved_recipe import from_saved, outside
from rlinf_vla.training.checkpoint_files import ADAPTER, COMPLETE, HEADS, STATE, verify

MODEL, DATASET = "model", "dataset"
ENVIRONMENT, MANIFEST = "environment.json", "manifest.json"
CHECKPOINT_FILES = (
    f"{ADAPTER}/adapter_config.json",
    f"{ADAPTER}/adapter_model.safetensors",
    HEADS,
    STATE,
)
WEIGHTS = ("model*.safetensors", "policy_*.safetensors", HEADS)
MODEL_FILES = (
    *WEIGHTS,
    *(
        "config.json",
        "*_config.json",
        "*processor*.json",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *(
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "dataset_statistics.json",
        "**/norm_stats.json",
        "experiment_cfg/metadata.json",
    ),
)
DATASET_FILES = (
    *(form.INFO, form.STATS, form.TASKS, f"{form.EPISODES}/chunk-*/file-*.parquet"),
    *("data/chunk-*/file-*.parquet", "videos/*/chunk-*/file-*.mp4"),
)
OLD_DATASET_FILES = (
    *(form.INFO, form.STATS, form.OLD_TASKS, form.OLD_EPISODES, form.OLD_EPISODES_STATS),
    *("data/chunk-*/episode_*.parquet", "videos/chunk-*/*/episode_*.mp4"),
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json")
"""JSON whose strings are tokens, which may look like paths."""
_START = r"(?:^|(?<=[\s=\[({,;\"'`|<@:]))(?!(?<=<)/\w+>)(?:file://|~[\w.-]*(?=/))?/(?!/)"
"""How an absolute path begins; ``</s>`` is a token."""
PATH = re.compile(rf"^{_START}.+|{_START}[^\s\"'`,;\])}}]+", re.DOTALL)
REST = re.compile(rf"{_START}.+", re.DOTALL)
"""A path in a word of a command line, to the word's end: it may hold anything."""
SECRET = re.compile(r"\bhf_\w{16,}|\bgh[oprsu]_\w{20,}|\bsk-[\w-]{20,}|(?<=://)[^/\s@]+@")


@dataclass
class Shared:
    """What is shared: ``files`` (path in the repository -> content, or the file that has it), and
    what the card tells."""

    kind: str
    files: dict[str, bytes | Path]
    recipe: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Keys of the recipe that name something of this machine."""
    base: str | None = None
    """The repository of the model that was trained."""
    checkpoint: str | None = None
    evaluations: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    """``meta/info.json`` of a dataset."""

    def size(self, name: str) -> int:
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size


def without_private(value: Any, path: re.Pattern[str] = PATH) -> Any:
    """Return JSON values with PATH and SECRET in place of absolute paths and secrets."""
    if isinstance(value, str):
        return path.sub("PATH", SECRET.sub("SECRET", value))
    if isinstance(value, Mapping):
        return {
            without_private(key): without_private(child, REST if key == "argv" else path)
            for key, child in value.items()
        }
    return (
        [without_private(element, path) for element in value] if isinstance(value, list) else value
    )


def of_run(directory: Path, checkpoint: Path, base: str | None) -> Shared:
    """Return a run's checkpoint, recipe and evaluations. ``base``: the repository of its initial
    model, needed if the recipe names a directory of this machine. Raises UserError."""
    verify(checkpoint)
    location = f"{CHECKPOINTS}/{checkpoint.name}"
    recipe, left_out = _recipe(saved_recipe(directory), str(directory / RECIPE))
    base = _with_base(recipe, base)
    files: dict[str, bytes | Path] = {
        name: _content(checkpoint / name)
        for name in CHECKPOINT_FILES
        if (checkpoint / name).exists()
    }
    files[COMPLETE] = _json({name: _digest(content) for name, content in files.items()})
    shared = Shared(
        MODEL,
        {f"{location}/{name}": content for name, content in files.items()},
        recipe,
        left_out,
        base,
        checkpoint.name,
    )
    version = read_document(checkpoint / STATE, "choose another checkpoint").get("policy_version")
    for path in sorted((directory / "evaluation").glob("*.json")):
        if path.stem not in ("before", "after") and step_of(path.stem) is None:
            continue
        document = read_document(path, "delete it")
        if path.stem == "before" or document.get("policy_version") == version:
            shared.evaluations[path.stem] = document = without_private(document)
            shared.files[f"evaluation/{path.name}"] = _json(document)
    if (directory / ENVIRONMENT).exists():
        shared.environment = without_private(read_document(directory / ENVIRONMENT, "delete it"))
        shared.files[ENVIRONMENT] = _json(shared.environment)
    shared.files[RECIPE] = OmegaConf.to_yaml(OmegaConf.create(recipe)).encode()
    return shared


def of_model(directory: Path, base: str | None) -> Shared:
    """Return a model directory in its official layout (``export`` writes it). Raises UserError."""
    files = {name: _content(directory / name) for name in _listed(directory, MODEL_FILES)}
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(
            f"{directory} has no weights in safetensors (pickles are not shared): export the run, and push what it writes"
        )
    shared = Shared(MODEL, files, base=base)
    if (directory / MANIFEST).exists():
        manifest = read_document(directory / MANIFEST, "delete it")
        recipe, shared.left_out = _recipe(manifest["recipe"], str(directory / MANIFEST))
        start = str(recipe["model"].get("checkpoint"))
        shared.base = base or (_repository(start) if start.startswith(HUB) else None)
        shared.recipe = without_private(recipe)
        shared.environment = without_private(manifest["environment"])
        shared.files[ENVIRONMENT] = _json(shared.environment)
    return shared


def of_dataset(directory: Path) -> Shared:
    """Return a LeRobotDataset. Raises UserError unless it is whole."""
    LeRobotReader(directory)
    info = read_document(directory / form.INFO, "copy the dataset again")
    version = info["codebase_version"]
    data, video, names = (
        (form.OLD_DATA_PATH, form.OLD_VIDEO_PATH, OLD_DATASET_FILES)
        if version in form.OLD_VERSIONS
        else (form.DATA_PATH, form.VIDEO_PATH, DATASET_FILES)
    )
    if info["data_path"] != data or info.get("video_path") not in (None, video):
        raise UserError(
            f"{directory / form.INFO}: data_path and video_path are not those of LeRobotDataset {version}"
        )
    files = {name: _content(directory / name) for name in _listed(directory, names)}
    return Shared(DATASET, files, info=without_private(info))


def check_tensors(directory: Path) -> None:
    """Raise UserError if a file of weights below ``directory`` is no safetensors file."""
    for path in sorted(directory.rglob("*.safetensors")):
        _check_tensors(path)


def _check_tensors(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as safetensors ({str(error).splitlines()[0]}): take another copy of it"
        ) from None


def _listed(directory: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    files = {
        path.relative_to(directory).as_posix()
        for pattern in patterns
        for path in directory.glob(pattern)
        if path.is_file()
    }
    yield from sorted(files)


def _content(path: Path) -> bytes | Path:
    """Return the file, or its bytes without what is private, if anything in it is."""
    if path.suffix == ".safetensors":
        _check_tensors(path)
    if path.suffix != ".json" or path.name in VOCABULARIES:
        return path
    before = read_document(path, "copy it again")
    after = without_private(before)
    return path if after == before else _json(after)


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _digest(content: bytes | Path) -> str:
    return sha256(content).hexdigest() if isinstance(content, bytes) else digest(content)


def _recipe(values: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe without keys that name something of this machine, and those keys."""
    config = from_saved(values, where)
    apart = {"run_dir", "output", "resume", "checkpoint"}
    of_machine = [
        key
        for key, _, is_default in outside(OmegaConf.to_object(config))
        if not is_default and key not in apart
    ]
    of_machine += [
        key
        for key, value in flat(values).items()
        if without_private(value) != value and key not in (*apart, "model.checkpoint")
    ]
    for key in {*of_machine, *apart}:
        _remove(values, key)
    return values, sorted(set(of_machine))


def _remove(values: dict[str, Any], key: str) -> None:
    *nodes, last = key.split(".")
    for name in nodes:
        values = values.get(name) or {}
    values.pop(last, None)


def _with_base(recipe: dict[str, Any], base: str | None) -> str | None:
    """Return the base model's repository; the recipe then names nothing of this machine."""
    checkpoint = str(recipe["model"].get("checkpoint"))
    if checkpoint.startswith(HUB):
        return base or _repository(checkpoint)
    if base is not None:
        recipe["model"]["checkpoint"] = HUB + base
    elif not checkpoint.startswith(ASSET) and checkpoint != NO_MODEL:
        raise UserError(
            f"model.checkpoint={checkpoint} is a directory of this machine: give its repository with --base-model ORG/NAME, "
            "or export the run and push the merged model"
        )
    return base


def _repository(location: str) -> str:
    return location.removeprefix(HUB).partition("@")[0]
