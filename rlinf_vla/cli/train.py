"""Run ``rlinf-vla train``: evaluate, train, evaluate again, write the report.

:class:`TrainingRun` has the loop: from the newest checkpoint to the end of the run.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rlinf_vla.algorithms.base import Algorithm
from rlinf_vla.config.cluster import CPU, GIVEN
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import SUPERVISED, Recipe
from rlinf_vla.config.robot import ROBOT
from rlinf_vla.core.interrupt import Interrupt, Interrupted, deferred_signals
from rlinf_vla.core.io import read_json, step_name, write_json
from rlinf_vla.core.protocols import Policy
from rlinf_vla.evaluation.evaluate import evaluate, headline, rates
from rlinf_vla.evaluation.statistics import compare
from rlinf_vla.runtime import builders, hooks, out_of_memory, run_directory
from rlinf_vla.runtime.base import BaseFlow, Restart, Runtime, Say
from rlinf_vla.runtime.open import open_runtime
from rlinf_vla.telemetry.console import TrainingConsole
from rlinf_vla.telemetry.environment import record
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.timeline import PREDICTED, RECORDED
from rlinf_vla.training.checkpoint import load_checkpoint, save_heads
from rlinf_vla.training.checkpoint_files import ADAPTER, STATE, complete_checkpoints, newest_sound

if TYPE_CHECKING:
    from rlinf_vla.runtime.hooks import Monitor

BEFORE, AFTER = "before", "after"
FAULTS = "faults.jsonl"
"""File of a run directory with the episodes that were cut."""


def run(config: DictConfig) -> None:
    """Train the recipe in a new or resumed run directory. Raises UserError."""
    recipe = run_directory.read(config)
    builders.require_training(recipe)
    algorithm = builders.build_algorithm(recipe)
    builders.require_trainable(recipe, algorithm)
    directory, checkpoint = run_directory.resolve_run(config)
    if checkpoint is None:  # otherwise the replay has the dataset's episodes
        builders.require_dataset(recipe)
    preview = None
    if recipe.cluster.on_accelerator:
        recipe, preview = hooks.planner().choose_rows(config, directory if checkpoint else None)
    recipe, monitor = _planned(recipe, preview.model if preview else None)
    if preview is not None:
        preview.show(recipe)
        preview.require_nothing()
    with (
        run_directory.locked(directory, config, checkpoint, algorithm.ends_with_run),
        out_of_memory.explained(recipe, True),
    ):
        # workers may have another working directory
        checkpoint = checkpoint and checkpoint.absolute()
        _train(recipe, algorithm, directory.absolute(), checkpoint, monitor)


def _train(
    recipe: Recipe,
    algorithm: Algorithm,
    directory: Path,
    checkpoint: Path | None,
    monitor: Monitor | None,
) -> None:
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


@dataclass
class TrainingRun:
    """A training run from its newest checkpoint to its end."""

    recipe: Recipe
    algorithm: Any
    directory: Path
    runtime: Runtime
    console: TrainingConsole
    metrics: MetricsLog
    monitor: Monitor | None

    @property
    def flow(self) -> Any:
        return self.runtime.flow

    def _evaluation(self, name: str) -> Path:
        return run_directory.evaluation_file(self.directory, name)

    def train(self, done: int, interrupt: Interrupt) -> int:
        """Train from iteration ``done`` on; return the number of finished iterations."""
        saved = done
        unsaid = True
        flow: BaseFlow = self.flow
        flow.policy_version = done

        def progress(stage: str, fraction: float) -> None:
            self.console.stage(stage, fraction)
            if not flow.changed:
                interrupt.check()
            interrupt.check_at_once()

        flow.progress = progress
        try:
            for iteration in range(done, self.recipe.iterations):
                interrupt.check()
                name = step_name(done)
                every = self.recipe.evaluation.every
                if (
                    every and done and done % every == 0 and not self.evaluated(name, done)
                ):  # after done iterations were saved
                    self.evaluate(name, done)
                started = time.perf_counter()
                flow.begin(iteration)
                self.algorithm.iteration(flow)
                done = iteration + 1
                flow.changed = False
                if unsaid and flow.parity is not None:
                    unsaid = False
                    self.console.say(flow.parity.report())
                seconds = time.perf_counter() - started
                flow.log({"timing_s/iteration": seconds} | self.algorithm.adapt(flow.metrics))
                if "rollout/steps" in flow.metrics:
                    flow.log({"throughput/steps_per_s": flow.metrics["rollout/steps"] / seconds})
                if self.monitor is not None:
                    flow.log(self.monitor.watch(flow.metrics, done - 1))
                self.report_faults(done)
                self.console.update(done, flow.metrics)
                if done % flow.metrics_every == 0:
                    self.metrics.write(done, flow.metrics)
                    flow.timeline.write(self.directory / RECORDED)
                if (
                    done % self.recipe.checkpoints.every == 0
                    or done == self.recipe.iterations
                    or flow.will_leave()
                ):
                    self.save(done)
                    saved = done
                if self.monitor is not None and done < self.recipe.iterations:
                    self.monitor.replan_if_due()
                if flow.enough():
                    break
            if done > saved:
                self.save(done)
        except Restart as restart:
            if restart.plan is not None and done > saved:
                self.save(done)
            raise
        except Interrupted as interruption:
            name = interruption.args[0]
            half_made = flow.changed and flow.iteration == done
            if not half_made and (done > saved or done == 0):
                self.save(done)
            where = f"in iteration {done + 1}" if half_made else f"after iteration {done}"
            self.console.say(
                f"{name}: stopped {where}; continue with run_dir={builders.relative(self.directory)} resume=auto"
            )
            raise
        return done

    def report_faults(self, iteration: int) -> None:
        """Report the episodes of the iteration that were cut because a simulator failed."""
        if not self.flow.faults:
            return
        with (self.directory / FAULTS).open("a") as file:
            file.writelines(
                json.dumps({"iteration": iteration} | fault.document()) + "\n"
                for fault in self.flow.faults
            )
        more = len(self.flow.faults) - 1
        self.console.say(
            f"{self.flow.faults[0]}" + (f", and {more} more" if more else "") + f" (all: {FAULTS})"
        )

    def save(self, iteration: int) -> None:
        directory = self.directory / run_directory.CHECKPOINTS
        state = (
            {"iteration": iteration, "seed": self.recipe.seed}
            | self.flow.save()
            | self.algorithm.state()
        )
        self.runtime.save(state)
        self.flow.saved(
            [_read_json(checkpoint / STATE) for checkpoint in complete_checkpoints(directory)]
        )

    def evaluate(self, name: str, iteration: int) -> None:
        runtime = self.runtime
        stage = self.flow.progress
        version = self.flow.policy_version
        if runtime.play is None:
            self._assess(name)
            return
        document = evaluate(
            self.recipe,
            runtime.play,
            runtime.calls_per_s,
            name,
            f"iteration {iteration}",
            version,
            self.directory,
            stage,
        )
        self.console.say(f"{name}: success {headline(document)}")
        self.metrics.write(iteration, rates(document))

    def _assess(self, name: str) -> None:
        """Evaluate a model that does not act on the frames that its training did not use."""
        from rlinf_vla.evaluation.held_out import assess

        document, headline = assess(self.flow, self.algorithm)
        write_json(self._evaluation(name), document)
        self.console.say(f"{name}: {headline}")

    def export(self) -> None:
        """Write a network that was trained whole in its official layout, ready to be used."""
        from rlinf_vla.cli.export import write_policy

        checkpoints = complete_checkpoints(self.directory / run_directory.CHECKPOINTS)
        if checkpoints and (checkpoints[-1] / ADAPTER).exists():
            return
        learner = getattr(self.flow, "learner", None)
        if learner is None:  # it is in the trainer's processes
            learner = builders.build_initial(
                replace(self.recipe, cluster=replace(self.recipe.cluster, device=CPU))
            )
            load_checkpoint(checkpoints[-1], learner)
        name, use = self.algorithm.product
        target = self.directory / name
        target.mkdir(exist_ok=True)
        write_policy(
            learner,
            target,
            OmegaConf.to_container(OmegaConf.load(self.directory / run_directory.RECIPE)),
            algorithm=self.algorithm.state(),
        )
        if self.algorithm.adds_heads and isinstance(learner, Policy):
            save_heads(learner, target)
        self.console.say(f"{name}: {builders.relative(target)} (use it as {use})")

    def evaluated(self, name: str, version: int) -> bool:
        """Whether there is an evaluation of this version, with the recipe's modes and episodes."""
        path = self._evaluation(name)
        recipe = self.recipe
        if not path.exists():
            return False
        document = _read_json(path)
        counts = [
            len(document[mode]["episodes"]) if mode in document else None
            for mode in recipe.evaluation.modes
        ]
        return document.get("policy_version") == version and (
            name == BEFORE or counts == [recipe.episodes] * len(counts)
        )

    def keep_earlier(self) -> None:
        """Keep the evaluation after the iterations so far, and its videos, under their number.

        That of a reward classifier has none.
        """
        path = self._evaluation(AFTER)
        version = _read_json(path).get("policy_version") if path.exists() else None
        if version is None:
            return
        name = step_name(version)
        if not self._evaluation(name).exists():
            path.rename(self._evaluation(name))
            for video in (self.directory / "videos").glob(f"{AFTER}_*"):
                video.rename(video.with_name(name + video.name.removeprefix(AFTER)))

    def compare(self) -> None:
        """Compare with the evaluation before training, if the run made one."""
        before, after = self._evaluation(BEFORE), self._evaluation(AFTER)
        if before.exists():
            write_json(
                self._evaluation("comparison"), compare(_read_json(before), _read_json(after))
            )

    def summary(self) -> list[str]:
        """Return one line of success each, before and after, of the evaluations that exist."""
        if self.runtime.play is None:
            return []
        paths = [self._evaluation(BEFORE), self._evaluation(AFTER)]
        return [
            f"success {path.stem:6s}: {headline(_read_json(path))}"
            for path in paths
            if path.exists()
        ]


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError if the file is damaged."""
    try:
        document = read_json(path)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UserError(
            f"{path} is damaged (not a JSON object): delete it, then continue with resume=auto"
        )
    return document
