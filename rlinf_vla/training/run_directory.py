"""One run, one directory: who may write it, and from which checkpoint it goes on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rlinf_vla.atomic import replacing
from rlinf_vla.training.checkpoint import complete_checkpoints
from rlinf_vla.types import UserError

RECIPE, CHECKPOINTS, REPLAY, LOCK, RESULT = "recipe.yaml", "checkpoints", "replay", ".lock", "result.json"
BLOCKS = "blocks"
"""Of a sweep: its parts."""
EPISODES = "episodes"
"""Of a robot's run: those that were played."""

# What may change between a run and its continuation: everything else would make it another run.
_FREE = {"iterations", "run_dir", "resume", "episodes", "cluster", "evaluation", "checkpoints", "record", "sweep", "session"}
_FREE |= {"rollout.pipeline_depth", "env.processes", "control"}
FREE_IN_SWEEPS = {"run_dir", "resume", "sweep.parallel", "evaluation.filmed", "rollout.pipeline_depth", "env.processes", "control"}
"""The same for a sweep."""
_FREE_IN_RECORDINGS = _FREE | {"output", "algorithm"}


def choose(config: DictConfig) -> tuple[Path, Path | None]:
    """The run directory and the checkpoint to go on from (None: from the start). Raises UserError."""
    resume, run_dir = config.resume, config.run_dir and Path(config.run_dir).expanduser()
    if resume not in ("auto", "never"):
        path = Path(resume).expanduser().absolute()
        checkpoint = path if path.name.startswith("step_") else _newest(path)
        if checkpoint is None or not checkpoint.is_dir():
            raise UserError(f"resume={resume}: no complete checkpoint there (a run directory or a checkpoints/step_* is expected)")
        directory = checkpoint.parent.parent
        if run_dir and run_dir.resolve() != directory.resolve():
            raise UserError(f"resume={resume} belongs to {directory}, run_dir says {run_dir}: leave run_dir out")
        return directory, checkpoint
    if run_dir is None and resume == "auto":
        runs = sorted((path.parent for path in Path("runs", config.name).glob(f"*/{RECIPE}")), key=lambda path: path.name)
        run_dir = next((run for run in reversed(runs) if not _is_sweep(run)), None)
    if run_dir is None:
        return _fresh(Path("runs", config.name)), None
    if _is_sweep(run_dir):
        raise UserError(f"run_dir={run_dir} holds an evaluation sweep: choose another run_dir")
    if resume == "never" and (run_dir / RECIPE).exists():
        raise UserError(f"run_dir={run_dir} holds a run already: continue it with resume=auto, or choose another run_dir")
    return run_dir, _newest(run_dir)


def for_evaluation(config: DictConfig, checkpoint: Path | None) -> Path:
    """Where an evaluation writes: ``run_dir``, else the run of its checkpoint, else a directory of its own."""
    if config.run_dir:
        return Path(config.run_dir).expanduser()
    if checkpoint is not None and checkpoint.resolve().parent.name == CHECKPOINTS:
        return checkpoint.resolve().parent.parent
    return _fresh(Path("runs", config.name))


def for_sweep(config: DictConfig) -> Path:
    """Where a sweep writes: ``run_dir``, else the newest unfinished sweep of this very recipe, else a directory of its own."""
    if config.run_dir:
        return Path(config.run_dir).expanduser()
    earlier = sorted((path for path in Path("runs", config.name).glob(f"*/{RECIPE}")), reverse=True)
    unfinished = (path for path in earlier if not (path.parent / RESULT).exists() and not _difference(path, config, FREE_IN_SWEEPS))
    return next((path.parent for path in unfinished), None) or _fresh(Path("runs", config.name))


@contextmanager
def opened(directory: Path, config: DictConfig, checkpoint: Path | None) -> Iterator[None]:
    """Hold the directory alone and keep its recipe; a continued run must be the same run. Raises UserError."""
    with _held(directory):
        begun = checkpoint is not None or _any(directory / "evaluation", "*.json") or _any(directory / EPISODES, "*")
        _require_same(directory, config, _FREE, begun, "resume")
        keep(directory, config)
        yield


@contextmanager
def opened_for_sweep(directory: Path, config: DictConfig) -> Iterator[None]:
    """The same for a sweep, which goes on wherever there is one. Raises UserError."""
    with _held(directory):
        _require_same(directory, config, FREE_IN_SWEEPS, True, f"run_dir={directory} holds something else")
        keep(directory, config)
        yield


@contextmanager
def opened_for_recording(directory: Path, config: DictConfig) -> Iterator[None]:
    """The same for the episodes of which a dataset will be made. Raises UserError."""
    with _held(directory):
        _require_same(directory, config, _FREE_IN_RECORDINGS, _any(directory, "*.safetensors"), f"{directory} holds other episodes")
        keep(directory, config)
        yield


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"run_dir={directory} cannot be written ({error.strerror}): choose another run_dir") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run_dir={directory} is in use by another run: wait for it, or choose another run_dir") from None
        yield
    finally:
        os.close(lock)


def keep(directory: Path, config: DictConfig) -> None:
    """The recipe, for whoever reads it there."""
    with replacing(directory / RECIPE) as aside:
        aside.write_text(OmegaConf.to_yaml(config, resolve=True))


def _is_sweep(directory: Path) -> bool:
    return (directory / BLOCKS).is_dir() or (directory / RESULT).exists()


def _any(directory: Path, pattern: str) -> bool:
    return any(directory.glob(pattern))


def _require_same(directory: Path, config: DictConfig, free: set[str], begun: bool, what: str) -> None:
    """Raises UserError. ``begun``: there is something that goes on."""
    if begun and (directory / RECIPE).exists() and (difference := _difference(directory / RECIPE, config, free)):
        raise UserError(f"{what}: {difference}")


def _newest(directory: Path) -> Path | None:
    found = complete_checkpoints(directory / CHECKPOINTS)
    return found[-1] if found else None


def _fresh(parent: Path) -> Path:
    """A directory named by the time that no run has yet; made here, so that two starts in one second differ."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = parent / f"{stamp}{suffix}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{path} cannot be made ({error.strerror}): choose a run_dir on a disk with room") from None
    raise UserError(f"{parent} holds too many runs of this second: set run_dir")


def _difference(path: Path, config: DictConfig, free: set[str]) -> str | None:
    """The first key of the kept recipe that is another now, of those that are not ``free``, and what to do about it."""
    before, now = _flat(OmegaConf.to_container(OmegaConf.load(path))), _flat(OmegaConf.to_container(config, resolve=True))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not any(key == each or key.startswith(f"{each}.") for each in free):
            return (
                f"{key} was {json.dumps(before.get(key))} in this run and is {json.dumps(now.get(key))} now: "
                "leave it as it was, or start a new run_dir"
            )
    return None


def _flat(node: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}.{name}" if prefix else str(name)).items()}
