"""Run ``rlinf-vla train``: evaluate, train, evaluate again, write the report."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from rlinf_vla.algorithms.base import Algorithm
from rlinf_vla.cli.training_run import AFTER, BEFORE, TrainingRun
from rlinf_vla.config.cluster import CUDA, GIVEN
from rlinf_vla.config.recipe import SUPERVISED, Recipe
from rlinf_vla.config.robot import ROBOT
from rlinf_vla.core.interrupt import deferred_signals
from rlinf_vla.runtime import builders, hooks, run_directory
from rlinf_vla.runtime.base import Restart, Runtime, Say
from rlinf_vla.runtime.open import open_runtime
from rlinf_vla.telemetry.console import TrainingConsole
from rlinf_vla.telemetry.environment import record
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.timeline import PREDICTED
from rlinf_vla.training.checkpoint_files import newest_sound

if TYPE_CHECKING:
    from rlinf_vla.runtime.hooks import Monitor


def run(config: DictConfig) -> None:
    """Train the recipe in a new or resumed run directory. Raises UserError."""
    recipe = run_directory.read(config)
    builders.require_training(recipe)
    directory, checkpoint = run_directory.resolve_run(config)
    preview = None
    if recipe.cluster.device == CUDA:
        recipe, preview = hooks.planner().choose_rows(config, directory if checkpoint else None)
    recipe, monitor = _planned(recipe, preview.model if preview else None)
    if preview is not None:
        preview.show(recipe)
        preview.require_nothing()
    with run_directory.locked(directory, config, checkpoint):
        _train(
            recipe, directory.absolute(), checkpoint and checkpoint.absolute(), monitor
        )  # workers may have another working directory


def _train(
    recipe: Recipe, directory: Path, checkpoint: Path | None, monitor: Monitor | None
) -> None:
    algorithm = builders.build_algorithm(recipe)
    started = time.monotonic()
    for line in record(directory):
        print(line)
    print(
        f"recipe {recipe.name} on cluster {recipe.cluster.name} ({recipe.cluster.device}), run directory {builders.relative(directory)}"
    )
    with ExitStack() as stack:
        stack.callback(_report, directory)
        brief = recipe.algorithm.family == SUPERVISED
        seconds = 60 * (recipe.session.minutes or math.inf)
        console = stack.enter_context(TrainingConsole(recipe.iterations, seconds, brief))
        losses_left = recipe.cluster.trainer_restarts
        while True:
            try:
                run = _attempt(recipe, algorithm, directory, checkpoint, console, monitor)
                break
            except Restart as restart:
                if restart.plan is not None:
                    assert monitor is not None
                    recipe, monitor = monitor.under(restart.plan)
                    reason = "another plan"
                elif losses_left:
                    losses_left = losses_left - 1
                    reason = str(restart)
                else:
                    raise
            checkpoint = newest_sound(directory / run_directory.CHECKPOINTS, console.say)
            console.say(
                f"{reason}: resuming from {'the beginning' if checkpoint is None else builders.relative(checkpoint)}"
            )
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes")
    for line in [*run.summary(), *filter(None, [monitor.summary_line() if monitor else None])]:
        print(line)
    print(f"report: {builders.relative(directory / 'report.html')}")


def _planned(recipe: Recipe, model: Any) -> tuple[Recipe, Monitor | None]:
    """Return the recipe under its plan, and a monitor if the recipe asks for a prediction."""
    if recipe.cluster.plan == GIVEN and recipe.profile is None:
        return recipe, None
    return hooks.planner().planned(recipe, print, model)


def _open_runtime(
    recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say
) -> AbstractContextManager[Runtime]:
    if recipe.env.name != ROBOT:
        return open_runtime(recipe, directory, checkpoint, say)
    return hooks.robot().at_robot(recipe, directory, checkpoint, say)


def _attempt(
    recipe: Recipe,
    algorithm: Algorithm,
    directory: Path,
    checkpoint: Path | None,
    console: TrainingConsole,
    monitor: Monitor | None,
) -> TrainingRun:
    """Train from ``checkpoint`` to the end. Raises Restart."""
    (directory / PREDICTED).unlink(missing_ok=True)  # of another plan
    if monitor is not None:
        monitor.write(directory)
    with ExitStack() as stack:
        runtime = stack.enter_context(_open_runtime(recipe, directory, checkpoint, console.say))
        done = runtime.state.get("iteration", 0)
        if checkpoint is not None:
            console.resume(done)
            console.say(f"continuing after iteration {done} from {builders.relative(checkpoint)}")
        algorithm.restore(runtime.state)
        if runtime.env is not None:
            algorithm.check(runtime.env)
        logged = (
            done if checkpoint or run_directory.evaluation_file(directory, BEFORE).exists() else -1
        )
        metrics = stack.enter_context(
            MetricsLog(
                directory,
                logged,
                recipe.tracker,
                run_directory.saved_recipe(directory),
                console.say,
            )
        )
        runtime.flow.progress = console.stage
        run = TrainingRun(recipe, algorithm, directory, runtime, console, metrics, monitor)
        supervised = recipe.algorithm.family == SUPERVISED
        evaluates = recipe.evaluation.before_and_after
        if evaluates and not supervised and done == 0 and not run.evaluated(BEFORE, 0):
            run.evaluate(BEFORE, 0)
        with deferred_signals() as interrupt:
            done = run.train(done, interrupt)
        if supervised:
            run.export()
        if evaluates:
            if not run.evaluated(AFTER, done):
                run.keep_earlier()
                run.evaluate(AFTER, done)
            run.compare()
        return run


def _report(directory: Path) -> None:
    """Write the report, however the run ends; a failure here must not hide why the run ended."""
    from rlinf_vla.telemetry import report

    try:
        report.write_report(directory)
    except OSError as error:
        print(f"the report could not be written: {error.strerror}")
