"""The training loop of ``rlinf-vla train``: iterations, checkpoints, evaluations, interrupts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.interrupt import Interrupt, Interrupted
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import Policy
from rlinf_vla.evaluation.evaluate import evaluate, headline
from rlinf_vla.evaluation.statistics import compare
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.base import BaseFlow, Restart, Runtime
from rlinf_vla.telemetry.console import TrainingConsole
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.training.checkpoint import ADAPTER, STATE, complete_checkpoints

if TYPE_CHECKING:
    from rlinf_vla.planner.monitor import PlanMonitor


class TrainingRun:
    """A training run from its newest checkpoint to its end."""

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Any,
        directory: Path,
        runtime: Runtime,
        console: TrainingConsole,
        metrics: MetricsLog,
        monitor: PlanMonitor | None,
    ) -> None:
        self.recipe, self.algorithm, self.directory, self.runtime = recipe, algorithm, directory, runtime
        self.console, self.metrics = console, metrics
        self.flow: Any = runtime.flow
        self.monitor = monitor

    def train(self, done: int, interrupt: Interrupt) -> int:
        """Train from iteration ``done`` on; return the number of finished iterations."""
        saved = done
        flow: BaseFlow = self.flow
        unsaid = True
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
                started = time.perf_counter()
                flow.begin(iteration)
                self.algorithm.iteration(flow)
                done = iteration + 1
                if unsaid and flow.parity is not None:
                    unsaid = False
                    self.console.say(f"first rollout: recomputed log-probabilities equal the stored ones to {flow.parity:.1e}")
                seconds = time.perf_counter() - started
                flow.log({"timing_s/iteration": seconds})
                if "rollout/steps" in flow.metrics:
                    flow.log({"throughput/steps_per_s": flow.metrics["rollout/steps"] / seconds})
                if self.monitor is not None:
                    flow.log(self.monitor.watch(flow.metrics, done - 1))
                self.console.update(done, flow.metrics)
                if done % flow.metrics_every == 0:
                    self.metrics.write(done, flow.metrics)
                    flow.timeline.write(self.directory / "timeline.json")
                every = self.recipe.evaluation.every
                if every and done % every == 0 and done < self.recipe.iterations:
                    self.evaluate(f"step_{done:06d}", done)
                if done % self.recipe.checkpoints.every == 0 or done == self.recipe.iterations:
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
            name, half_made = interruption.args[0], flow.changed and flow.iteration == done
            if not half_made and (done > saved or done == 0):
                self.save(done)
            where = f"in iteration {done + 1}" if half_made else f"after iteration {done}"
            self.console.say(f"{name}: stopped {where}; continue with run_dir={builders.relative(self.directory)} resume=auto")
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
        if runtime.play is None:
            self._classify(name)
            return
        document = evaluate(self.recipe, runtime.play, runtime.calls_per_s, name, label, version, self.directory, stage)
        self.console.say(f"{name}: success {headline(document)}")
        rates = {"sampled": "eval/success_once", "greedy": "eval/success_once_greedy"}
        self.metrics.write(iteration, {rates[mode]: document[mode]["pc_success"] / 100 for mode in rates if mode in document})

    def _classify(self, name: str) -> None:
        """Evaluate a reward classifier on the frames that its training did not use."""
        from rlinf_vla.evaluation.classification import accuracy_headline, classification_accuracy

        flow, algorithm = self.flow, self.algorithm
        frames = flow.label(algorithm.config.demonstrations)
        document = classification_accuracy(flow.learner, frames[algorithm.split(frames)[1]], self.recipe.cluster.micro_batch_size)
        write_json(self.directory / "evaluation" / f"{name}.json", document)
        self.console.say(f"{name}: {accuracy_headline(document)}")

    def export(self) -> None:
        """Write a network that was trained whole in its official layout, ready to be used."""
        from rlinf_vla.cli.export import write_policy

        learner, checkpoints = self.flow.learner, complete_checkpoints(self.directory / run_directory.CHECKPOINTS)
        if checkpoints and (checkpoints[-1] / ADAPTER).exists():
            return
        of_policy = isinstance(learner, Policy)
        use, name = ("model.checkpoint", "policy") if of_policy else ("reward=classifier reward.options.checkpoint", "classifier")
        target = self.directory / name
        target.mkdir(exist_ok=True)
        write_policy(learner, target, OmegaConf.to_container(OmegaConf.load(self.directory / run_directory.RECIPE)))
        self.console.say(f"{name}: {builders.relative(target)} (use it as {use})")

    def evaluated(self, name: str, version: int) -> bool:
        path = self.directory / "evaluation" / f"{name}.json"
        return path.exists() and _read_json(path).get("policy_version") == version

    def compare(self) -> None:
        """Compare with the evaluation before training, if the run made one."""
        before, after = (self.directory / "evaluation" / f"{name}.json" for name in ("before", "after"))
        if before.exists():
            write_json(self.directory / "evaluation" / "comparison.json", compare(_read_json(before), _read_json(after)))

    def summary(self) -> list[str]:
        """Return one line of success each, before and after, of the evaluations that exist."""
        if self.runtime.play is None:
            return []
        paths = [self.directory / "evaluation" / f"{name}.json" for name in ("before", "after")]
        return [f"success {path.stem:6s}: {headline(_read_json(path))}" for path in paths if path.exists()]


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError if the file is damaged."""
    try:
        document = json.loads(path.read_text())
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UserError(f"{path} is damaged (not a JSON object): delete it, then continue with resume=auto")
    return document
