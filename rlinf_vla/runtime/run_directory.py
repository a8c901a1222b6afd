"""Choose, lock and check run directories, and find the checkpoint from which a run resumes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe, flat
from rlinf_vla.core.io import read_yaml, replacing
from rlinf_vla.runtime import recipes
from rlinf_vla.training.checkpoint_files import COMPLETE, complete_checkpoints, newest_sound

RUNS = Path("runs")
RECIPE = "recipe.yaml"
CHECKPOINTS = "checkpoints"
REPLAY = "replay"
LOCK = ".lock"
RESULT = "result.json"
BLOCKS = "blocks"
"""Folder of an evaluation sweep's parts."""
EPISODES = "episodes"
"""Folder of the recorded episodes of a robot run."""

# Keys that may change when a run is resumed; any other change would make it a different run.
_FREE = {
    "iterations",
    "run_dir",
    "resume",
    "episodes",
    "cluster",
    "evaluation",
    "checkpoints",
    "record",
    "sweep",
    "session",
}
_FREE |= {"rollout.pipeline_depth", "env.processes", "control", "serve", "tracker"}
FREE_IN_SWEEPS = {
    "run_dir",
    "resume",
    "sweep.parallel",
    "evaluation.filmed",
    "rollout.pipeline_depth",
    "env.processes",
    "control",
    "serve",
}
FREE_IN_SWEEPS |= {"tracker"}
"""Keys that may change when a sweep is resumed."""
_FREE_IN_EVALUATIONS = _FREE - {"episodes", "evaluation", "control"} | {
    "checkpoint",
    "output",
    "output_dtype",
    "profile",
    "env.num_envs",
}
_FREE_IN_EVALUATIONS |= {
    "rollout.split",
    "rollout.backbone",
    "evaluation.every",
    "evaluation.before_and_after",
    "evaluation.filmed",
}
"""Keys that do not change the result of an evaluation."""
_OF_A_SERVER = {
    f"model.options.{key}"
    for key in ("url", "token_env", "ca_file", "timeout_s", "retries", "connections")
}
"""Where a policy is, and how it is asked; which policy it is, is in the sweep's provenance."""


def resolve_run(config: DictConfig, say: Callable[[str], None] = print) -> tuple[Path, Path | None]:
    """Return the run directory and the checkpoint to resume (None: start anew). Raises UserError.

    ``say`` reports the runs that ``resume=auto`` skips, or that it finds no checkpoint.
    """
    resume = config.resume
    run_dir = config.run_dir and Path(config.run_dir).expanduser()
    runs = RUNS / config.name
    if resume not in ("auto", "never"):
        directory, checkpoint = split(checkpoint_at(resume, "resume"))
        if checkpoint is None:
            raise UserError(
                f"resume={resume} is a checkpoint outside a run directory: start a new run with checkpoint={resume}"
            )
        if run_dir and run_dir.resolve() != directory.resolve():
            raise UserError(
                f"resume={resume} belongs to {directory}, run_dir is {run_dir}: remove run_dir"
            )
        return directory, checkpoint
    if run_dir is None:
        directory = (_newest_of(runs, say) if resume == "auto" else None) or _fresh(runs)
    else:
        directory = run_dir
    if is_sweep(directory):
        raise UserError(f"run_dir={run_dir} holds an evaluation sweep: choose another run_dir")
    checkpoint = (
        _newest(directory) if resume == "never" else newest_sound(directory / CHECKPOINTS, say)
    )
    if resume == "never" and (checkpoint or (directory / RECIPE).exists()):
        raise UserError(
            f"run_dir={run_dir} holds a run already: continue it with resume=auto, or choose another run_dir"
        )
    if resume == "auto" and checkpoint is None:
        say(
            f"resume=auto: no complete checkpoint in {run_dir or runs}: training starts anew in {directory}"
        )
    return directory, checkpoint


def split(path: Path) -> tuple[Path, Path | None]:
    """Split ``path`` into run directory and checkpoint; None if it is the run directory itself."""
    for candidate in (path.expanduser().absolute(), path.expanduser().resolve()):
        if candidate.parent.name == CHECKPOINTS:
            return candidate.parent.parent, candidate
    return path.expanduser().absolute(), None


def checkpoint_at(location: str, key: str) -> Path:
    """Return the checkpoint at ``location``, or the newest complete one of the run there.

    Raises UserError if there is none; ``key`` is the recipe key to name in the message.
    """
    path = Path(location).expanduser()
    if not path.is_dir():
        raise UserError(f"{key}={location}: no such directory")
    is_one = split(path)[1] is not None or (path / COMPLETE).exists()
    checkpoint = path if is_one else _newest(path)
    if checkpoint is None:
        raise UserError(
            f"{key}={location}: no complete checkpoint there (a run directory or a checkpoints/step_* is expected)"
        )
    return checkpoint


def read(config: DictConfig) -> Recipe:
    """Return the recipe, whose ``checkpoint`` is the one that is meant now. Raises UserError."""
    recipe = recipes.read(config)
    if recipe.checkpoint:
        config.checkpoint = str(checkpoint_at(recipe.checkpoint, "checkpoint").absolute())
        recipe = recipes.read(config)  # sweep.policies may name it
    return recipe


def _newest_of(runs: Path, say: Callable[[str], None]) -> Path | None:
    """Return the run with the most recent complete checkpoint; if none has any, the last by name.

    It need not be the newest run, because a failed start also leaves a directory.
    """
    directories = sorted(
        path.parent for path in runs.glob(f"*/{RECIPE}") if not is_sweep(path.parent)
    )
    written = {
        run: (checkpoint / COMPLETE).stat().st_mtime_ns
        for run in directories
        if (checkpoint := _newest(run))
    }
    if not written:
        return directories[-1] if directories else None
    chosen = max(written, key=lambda run: (written[run], run))
    for run in directories:
        if run not in written and (run / RECIPE).stat().st_mtime_ns > written[chosen]:
            say(
                f"resume=auto: {run} is newer but has no complete checkpoint: resuming {chosen} instead"
            )
    return chosen


def evaluation_file(directory: Path, name: str) -> Path:
    """Return the JSON file of an evaluation in a run's directory."""
    return directory / "evaluation" / f"{name}.json"


def for_evaluation(config: DictConfig, checkpoint: Path | None) -> Path:
    """Return an evaluation's directory: ``run_dir``, else its checkpoint's run, else a new one.

    With a recipe other than the run's the directory is new. Raises UserError if ``run_dir`` holds
    such a run, or if the directory is not writable, before any episode runs.
    """
    if config.run_dir:
        directory = Path(config.run_dir).expanduser()
    elif checkpoint is not None and checkpoint.resolve().parent.name == CHECKPOINTS:
        directory = checkpoint.resolve().parent.parent
    else:
        return _fresh(RUNS / config.name)
    of_run = checkpoint is not None and (directory / RECIPE).exists()
    if of_run and (difference := _difference(directory, config, _FREE_IN_EVALUATIONS)):
        if config.run_dir:
            raise UserError(
                f"{difference[0]}: an evaluation of another recipe does not belong to that run, choose another run_dir"
            )
        print(f"not among the run's own evaluations: {difference[0]}")
        return _fresh(RUNS / config.name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise UserError(f"run_dir={directory} cannot be written: choose another run_dir")
    return directory


def for_sweep(config: DictConfig) -> Path:
    """Return where a sweep writes: ``run_dir``, else the newest unfinished sweep of an equal
    recipe, else a new directory."""
    if config.run_dir:
        return Path(config.run_dir).expanduser()
    runs = RUNS / config.name
    earlier = sorted((path.parent for path in runs.glob(f"*/{RECIPE}")), reverse=True)
    unfinished = (
        run for run in earlier if not (run / RESULT).exists() and _same(run, config, FREE_IN_SWEEPS)
    )
    return next(unfinished, None) or _fresh(runs)


def locked(
    directory: Path, config: DictConfig, checkpoint: Path | None, schedule: str | None = None
) -> AbstractContextManager[None]:
    """Lock the run directory within the context and save the recipe.

    ``schedule``: why a resumed run must keep ``iterations`` (``Algorithm.ends_with_run``). Raises
    UserError if the directory is in use or not writable, or if a resumed run has another recipe.
    """

    def begun() -> bool:
        return (
            checkpoint is not None
            or any(directory.glob("evaluation/*.json"))
            or any(directory.glob(f"{EPISODES}/*"))
        )

    free = _FREE if schedule is None else _FREE - {"iterations"}
    what = "resume" if schedule is None else f"resume ({schedule})"
    return _locked(directory, config, free, begun, what)


def opened_for_sweep(directory: Path, config: DictConfig) -> AbstractContextManager[None]:
    """Do the same for a sweep, which always resumes if there is one. Raises UserError."""
    return _locked(
        directory,
        config,
        FREE_IN_SWEEPS | _OF_A_SERVER,
        lambda: True,
        f"run_dir={directory} belongs to another recipe",
    )


def opened_for_recording(
    directory: Path, config: DictConfig, fixed: Set[str] = frozenset()
) -> AbstractContextManager[None]:
    """Do the same for the episodes of a dataset that is being recorded, whose keys ``fixed`` change
    the episodes, too. Raises UserError."""
    free = (_FREE | {"output", "algorithm"}) - fixed | {"algorithm.demonstrations.episodes"}
    return _locked(
        directory,
        config,
        free,
        lambda: any(directory.glob("*_[0-9]*.*")),
        f"{directory} holds other episodes",
    )


@contextmanager
def _locked(
    directory: Path, config: DictConfig, free: set[str], begun: Callable[[], bool], what: str
) -> Iterator[None]:
    """``begun``: whether there is work to resume, for which only keys in ``free`` may change."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"run_dir={directory} cannot be written ({error.strerror}): choose another run_dir"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run_dir={directory} is in use by another run: wait for it, or choose another run_dir"
            ) from None
        if (
            begun()
            and (directory / RECIPE).exists()
            and (difference := _difference(directory, config, free))
        ):
            raise UserError(f"{what}: {': '.join(difference)}, or choose a new run_dir")
        save_recipe(directory / RECIPE, config)
        yield
    finally:
        os.close(lock)


@contextmanager
def held(directory: Path) -> Iterator[bool]:
    """Keep a run from starting within the context; yields False if one is running there."""
    if not (directory / LOCK).exists():  # its run has not begun, or it was copied without the file
        yield True
        return
    lock = os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
    try:
        try:
            fcntl.flock(
                lock, fcntl.LOCK_SH | fcntl.LOCK_NB
            )  # shared: two listings must not take each other for a run
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)


def save_recipe(path: Path, config: DictConfig) -> None:
    """Write the resolved recipe to ``path``."""
    with replacing(path) as aside:
        aside.write_text(OmegaConf.to_yaml(config, resolve=True))


def saved_recipe(directory: Path) -> dict[str, Any]:
    """Return the values of a run's recipe. Raises UserError if there is none."""
    if not (directory / RECIPE).exists():
        raise UserError(f"{directory} is not a run directory: {RECIPE} is missing")
    return recipe_values(directory / RECIPE)


def recipe_values(path: Path) -> dict[str, Any]:
    """Return the values of a recipe that ``save_recipe`` wrote.

    The file may be untrusted, so interpolations are not resolved. Raises UserError.
    """
    try:
        values = read_yaml(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): it is damaged, use another copy of it"
        ) from None
    if not isinstance(values, dict) or "name" not in values:
        raise UserError(
            f"{path} cannot be read (it has no recipe name): it is damaged, use another copy of it"
        )
    return values


def is_sweep(directory: Path) -> bool:
    """Return whether ``directory`` holds an evaluation sweep or part of one."""
    return (directory / BLOCKS).is_dir() or (directory / RESULT).exists()


def _same(directory: Path, config: DictConfig, free: set[str]) -> bool:
    try:
        return _difference(directory, config, free) is None
    except UserError:  # a damaged recipe.yaml belongs to another sweep
        return False


def _newest(directory: Path) -> Path | None:
    checkpoints = complete_checkpoints(directory / CHECKPOINTS)
    return checkpoints[-1] if checkpoints else None


def _fresh(parent: Path) -> Path:
    """Create a new directory named by the time; two starts in one second get different names."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = parent / f"{stamp}{suffix}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"{path} cannot be created ({error.strerror}): choose a run_dir on a disk with room"
            ) from None
    raise UserError(f"{parent} has too many runs that started in this second: set run_dir")


def _difference(directory: Path, config: DictConfig, free: set[str]) -> tuple[str, str] | None:
    """Describe the first key, not in ``free``, that differs from the saved recipe, and the fix."""
    before = flat(saved_recipe(directory))
    now = flat(OmegaConf.to_container(config, resolve=True))
    both = before.keys() & now.keys()
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key not in both, key)):
        if before.get(key) != now.get(key) and not any(
            key == prefix or key.startswith(f"{prefix}.") for prefix in free
        ):
            fix = (
                "restore its value"
                if key in both
                else "continue it with the version of rlinf-vla that began it"
            )
            return (
                f"{key} was {_told(before, key)} in {directory} and is {_told(now, key)} now",
                fix,
            )
    return None


def _told(values: dict[str, object], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"
