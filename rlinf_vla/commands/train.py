"""``rlinf-vla train``: evaluate, improve, evaluate again, report."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_vla import recipe as recipes
from rlinf_vla.atomic import write_json
from rlinf_vla.commands import runtimes, session, supervised
from rlinf_vla.commands.evaluate import evaluate, headline
from rlinf_vla.commands.foresight import Foresight, Replanned, foreseen
from rlinf_vla.commands.interrupt import Interrupt, Interrupted, deferred
from rlinf_vla.commands.plan import following
from rlinf_vla.commands.runtimes import Runtime
from rlinf_vla.evaluation.statistics import compare
from rlinf_vla.flow.on_ray.training import TrainerLost
from rlinf_vla.recipe import Recipe
from rlinf_vla.recipe.evaluation import NO_ALGORITHM
from rlinf_vla.telemetry.console import TrainingConsole
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.report import write_report
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import STATE, complete_checkpoints
from rlinf_vla.types import UserError


def run(config: DictConfig) -> None:
    recipe = recipes.read(config)
    if recipe.algorithm.name == NO_ALGORITHM:
        raise UserError(f"recipe={recipe.name} trains nothing (algorithm={NO_ALGORITHM}): rlinf-vla eval recipe={recipe.name}")
    learn = supervised.learn if recipe.algorithm.name in supervised.ALGORITHMS else _train
    directory, checkpoint = run_directory.choose(config)
    with run_directory.opened(directory, config, checkpoint):
        learn(recipe, directory, checkpoint)


def _train(recipe: Recipe, directory: Path, checkpoint: Path | None) -> None:
    algorithm = session.build_algorithm(recipe)
    started = time.monotonic()
    write_json(directory / "environment.json", fingerprint())
    print(f"recipe {recipe.name} on cluster {recipe.cluster.name} ({recipe.cluster.device}), run directory {session.relative(directory)}")
    with ExitStack() as stack:
        stack.callback(_report, directory)
        console = stack.enter_context(TrainingConsole(recipe.iterations, 60 * (recipe.session.minutes or math.inf)))
        recipe, foresight = foreseen(recipe, console.say)
        losses_left = recipe.cluster.trainer_restarts
        while True:
            try:
                run = _attempt(recipe, algorithm, directory, checkpoint, console, foresight)
                break
            except TrainerLost as loss:
                if not losses_left:
                    raise
                losses_left, reason = losses_left - 1, str(loss)
            except Replanned as change:
                assert foresight is not None
                recipe, foresight, reason = following(recipe, change.plan), foresight.under(change.plan), "another plan"
            checkpoint = next(reversed(complete_checkpoints(directory / run_directory.CHECKPOINTS)), None)
            console.say(f"{reason}: going on from {'the beginning' if checkpoint is None else session.relative(checkpoint)}")
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes")
    for line in [*run.summary(), *filter(None, [foresight.ends_with() if foresight else None])]:
        print(line)
    print(f"report: {session.relative(directory / 'report.html')}")


def _attempt(
    recipe: Recipe, algorithm: Any, directory: Path, checkpoint: Path | None, console: TrainingConsole, foresight: Foresight | None
) -> _Run:
    """From ``checkpoint`` to the end. Raises TrainerLost and Replanned where the next attempt may get further."""
    with ExitStack() as stack:
        runtime = stack.enter_context(runtimes.opened(recipe, directory, checkpoint, console.say))
        done = runtime.state.get("iteration", 0)
        if checkpoint is not None:
            console.resume(done)
            console.say(f"continuing after iteration {done} from {session.relative(checkpoint)}")
        algorithm.check(runtime.env)
        metrics = stack.enter_context(MetricsLog(directory, resume_step=done if checkpoint else -1))
        run = _Run(recipe, directory, runtime, console, metrics, foresight)
        if recipe.evaluation.before_and_after and done == 0 and not run.evaluated("before", 0):
            run.evaluate("before", 0)
        with deferred() as interrupt:
            done = run.train(algorithm, done, interrupt)
        if recipe.evaluation.before_and_after:
            if not run.evaluated("after", done):
                run.evaluate("after", done)
            run.compare()
        return run


def _report(directory: Path) -> None:
    """However a run ends, its report shows how far it came; failing to write one must not hide why it ended."""
    try:
        write_report(directory)
    except OSError as error:
        print(f"the report could not be written: {error.strerror}")


class _Run:
    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        runtime: Runtime,
        console: TrainingConsole,
        metrics: MetricsLog,
        foresight: Foresight | None,
    ) -> None:
        self.recipe, self.directory, self.runtime, self.console, self.metrics = recipe, directory, runtime, console, metrics
        self.flow, self.foresight = runtime.flow, foresight

    def train(self, algorithm: Any, done: int, interrupt: Interrupt) -> int:
        """From iteration ``done`` on; returns how many there are then."""
        saved = done
        flow = self.flow
        unsaid = True
        flow.policy_version = done

        def progress(stage: str, fraction: float) -> None:
            self.console.stage(stage, fraction)
            if stage == "rollout" and not flow.changed:
                interrupt.check()
            interrupt.check_at_once()

        flow.progress = progress
        try:
            for iteration in range(done, self.recipe.iterations):
                interrupt.check()
                started = time.perf_counter()
                flow.begin(iteration)
                algorithm.iteration(flow)
                done = iteration + 1
                if unsaid and flow.parity is not None:
                    unsaid = False
                    self.console.say(f"first rollout: recomputed log-probabilities equal the stored ones to {flow.parity:.1e}")
                seconds = time.perf_counter() - started
                flow.log({"timing_s/iteration": seconds, "throughput/steps_per_s": flow.metrics["rollout/steps"] / seconds})
                if self.foresight is not None:
                    flow.log(self.foresight.watch(flow.metrics, done - 1))
                self.metrics.write(done, flow.metrics)
                self.console.update(done, flow.metrics)
                flow.timeline.write(self.directory / "timeline.json")
                every = self.recipe.evaluation.every
                if every and done % every == 0 and done < self.recipe.iterations:
                    self.evaluate(f"step_{done:06d}", done)
                if done % self.recipe.checkpoints.every == 0 or done == self.recipe.iterations:
                    self.save(done)
                    saved = done
                if self.foresight is not None and done < self.recipe.iterations:
                    self.foresight.look_again()
                if flow.enough():
                    break
            if done > saved:
                self.save(done)
        except Replanned:
            if done > saved:
                self.save(done)
            raise
        except Interrupted as interruption:
            name, half_made = interruption.args[0], flow.changed and flow.iteration == done
            if not half_made and (done > saved or done == 0):
                self.save(done)
            where = f"in iteration {done + 1}" if half_made else f"after iteration {done}"
            self.console.say(f"{name}: stopped {where}; go on with run_dir={session.relative(self.directory)} resume=auto")
            raise
        return done

    def save(self, iteration: int) -> None:
        directory = self.directory / run_directory.CHECKPOINTS
        state = {"iteration": iteration, "seed": self.recipe.seed} | self.flow.save()
        self.runtime.save(state)
        self.flow.saved([_read_json(each / STATE) for each in complete_checkpoints(directory)])

    def evaluate(self, name: str, iteration: int) -> None:
        label, version = f"iteration {iteration}", self.flow.policy_version
        runtime, stage = self.runtime, self.console.stage
        document = evaluate(self.recipe, runtime.play, runtime.calls_per_s, name, label, version, self.directory, stage)
        self.console.say(f"{name}: success {headline(document)}")
        rates = {"sampled": "eval/success_once", "greedy": "eval/success_once_greedy"}
        self.metrics.write(iteration, {rates[mode]: document[mode]["pc_success"] / 100 for mode in rates if mode in document})

    def evaluated(self, name: str, version: int) -> bool:
        path = self.directory / "evaluation" / f"{name}.json"
        return path.exists() and _read_json(path).get("policy_version") == version

    def compare(self) -> None:
        """With what was before, where that is known: a run may have been told late to evaluate."""
        before, after = (self.directory / "evaluation" / f"{name}.json" for name in ("before", "after"))
        if before.exists():
            write_json(self.directory / "evaluation" / "comparison.json", compare(_read_json(before), _read_json(after)))

    def summary(self) -> list[str]:
        """Success before and after, where both are known."""
        paths = [self.directory / "evaluation" / f"{name}.json" for name in ("before", "after")]
        return [f"success {path.stem:6s}: {headline(_read_json(path))}" for path in paths if path.exists()]


def _read_json(path: Path) -> dict[str, Any]:
    """Raises UserError where it is no JSON object."""
    try:
        document = json.loads(path.read_text())
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UserError(f"{path} is damaged (no JSON object): delete it, then go on with resume=auto")
    return document
