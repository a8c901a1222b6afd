"""``rlinf-vla train``: evaluate, improve, evaluate again, report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_vla import recipe as recipes
from rlinf_vla.algorithms.grpo import GRPO
from rlinf_vla.algorithms.ppo import PPO
from rlinf_vla.algorithms.sac import SAC
from rlinf_vla.algorithms.soft import SoftPolicy
from rlinf_vla.commands import session, supervised
from rlinf_vla.commands.evaluate import evaluate, headline
from rlinf_vla.commands.interrupt import Interrupt, Interrupted, deferred
from rlinf_vla.evaluation.statistics import compare
from rlinf_vla.flow.off_policy import OffPolicyFlow
from rlinf_vla.flow.runtime import InProcessFlow, LocalFlow
from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.recipe import Recipe
from rlinf_vla.telemetry.console import TrainingConsole
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.report import write_report
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import STATE, complete_checkpoints, load_checkpoint, save_checkpoint, write_json
from rlinf_vla.training.soft_trainer import SoftTrainer
from rlinf_vla.training.trainer import Optimisation, Trainer

ALGORITHMS: dict[str, Any] = {"ppo": PPO, "grpo": GRPO, "sac": SAC}


def run(config: DictConfig) -> None:
    recipe = recipes.read(config)
    learn = supervised.learn if recipe.algorithm.name in supervised.ALGORITHMS else _train
    directory, checkpoint = run_directory.choose(config)
    with run_directory.opened(directory, config, checkpoint):
        learn(recipe, directory, checkpoint)


def _train(recipe: Recipe, directory: Path, checkpoint: Path | None) -> None:
    algorithm = ALGORITHMS[recipe.algorithm.name](recipe.algorithm, recipe.rollout.temperature)
    started = time.monotonic()
    write_json(directory / "environment.json", fingerprint())
    policy = session.build_policy(recipe)
    if recipe.checkpoint is not None:
        load_checkpoint(Path(recipe.checkpoint).expanduser(), policy)
    trainer = build_trainer(recipe, policy)
    state = load_checkpoint(checkpoint, policy, trainer) if checkpoint is not None else {}
    done = state.get("iteration", 0)
    trainable = sum(parameter.numel() for parameter in trainer.parameters.values())
    print(f"recipe {recipe.name} on cluster {recipe.cluster.name} ({recipe.cluster.device}), run directory {session.relative(directory)}")
    print(f"policy {recipe.model.name}: {sum(p.numel() for p in policy.parameters()):,} weights, {trainable:,} of them trained")
    if checkpoint is not None:
        print(f"continuing after iteration {done} from {session.relative(checkpoint)}")
    with ExitStack() as stack:
        stack.callback(_report, directory)
        console = stack.enter_context(TrainingConsole(recipe.iterations, start=done))
        console.say(f"starting {recipe.env.num_envs} environments ({recipe.env.name})")
        groups = stack.enter_context(session.open_envs(recipe, policy, recipe.rollout.pipeline_depth))
        algorithm.check(groups[0].spec)
        stack.enter_context(session.threads(recipe.cluster.rollout_threads))
        metrics = stack.enter_context(MetricsLog(directory, resume_step=done if checkpoint else -1))
        flow = _flow(recipe, policy, session.rewarded(recipe, groups), trainer, directory, state)
        run = _Run(recipe, directory, policy, groups, trainer, flow, console, metrics)
        if recipe.evaluation.before_and_after and done == 0:
            run.evaluate("before", 0)
        with deferred() as interrupt:
            run.train(algorithm, done, interrupt)
        if recipe.evaluation.before_and_after and not run.evaluated("after", recipe.iterations):
            run.evaluate("after", recipe.iterations)
            run.compare()
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes")
    for line in run.summary():
        print(line)
    print(f"report: {session.relative(directory / 'report.html')}")


def build_trainer(recipe: Recipe, policy: Policy) -> Trainer | SoftTrainer:
    config = recipe.algorithm
    if isinstance(policy, SoftPolicy):
        return SoftTrainer(policy, config)
    rate = config.learning_rate
    settings = Optimisation(rate, getattr(config, "value_learning_rate", rate), config.max_grad_norm, betas=(0.9, config.adam_beta2))
    return Trainer(policy, settings, recipe.cluster.micro_batch_size, keep_reference=config.kl_coef > 0)


def _flow(
    recipe: Recipe,
    policy: Policy,
    groups: Sequence[VectorEnv],
    trainer: Trainer | SoftTrainer,
    directory: Path,
    state: dict[str, Any],
) -> LocalFlow:
    settings = session.actor_settings(recipe, recipe.rollout.temperature)
    threads = partial(session.threads, recipe.cluster.update_threads)
    if isinstance(trainer, SoftTrainer):
        replay = directory / run_directory.REPLAY
        return OffPolicyFlow(trainer.policy, groups, trainer, settings, Timeline(), recipe.algorithm, replay, state, update_threads=threads)
    return InProcessFlow(policy, groups, trainer, settings, Timeline(), reuse_frozen=recipe.cluster.reuse_frozen, update_threads=threads)


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
        policy: Policy,
        groups: Sequence[VectorEnv],
        trainer: Trainer | SoftTrainer,
        flow: LocalFlow,
        console: TrainingConsole,
        metrics: MetricsLog,
    ) -> None:
        self.recipe, self.directory, self.policy, self.groups = recipe, directory, policy, groups
        self.trainer, self.flow, self.console, self.metrics = trainer, flow, console, metrics

    def train(self, algorithm: Any, done: int, interrupt: Interrupt) -> None:
        first = saved = done
        flow = self.flow
        flow.policy_version = done

        def progress(stage: str, fraction: float) -> None:
            self.console.stage(stage, fraction)
            if stage == "rollout":
                interrupt.check()  # nothing has changed since the last iteration; a half-made update would be lost

        flow.progress = progress
        try:
            for iteration in range(done, self.recipe.iterations):
                interrupt.check()
                started = time.perf_counter()
                flow.begin(iteration)
                algorithm.iteration(flow)
                done = iteration + 1
                if iteration == first and flow.parity is not None:
                    self.console.say(f"first rollout: recomputed log-probabilities equal the stored ones to {flow.parity:.1e}")
                seconds = time.perf_counter() - started
                flow.log({"timing_s/iteration": seconds, "throughput/steps_per_s": flow.metrics["rollout/steps"] / seconds})
                self.metrics.write(done, flow.metrics)
                self.console.update(done, flow.metrics)
                flow.timeline.write(self.directory / "timeline.json")
                every = self.recipe.evaluation.every
                if every and done % every == 0 and done < self.recipe.iterations:
                    self.evaluate(f"step_{done:06d}", done)
                if done % self.recipe.checkpoints.every == 0 or done == self.recipe.iterations:
                    self.save(done)
                    saved = done
        except Interrupted as interruption:
            if done > saved or done == 0:
                self.save(done)
            name = interruption.args[0]
            self.console.say(f"{name}: stopped after iteration {done}; go on with run_dir={session.relative(self.directory)} resume=auto")
            raise

    def save(self, iteration: int) -> None:
        directory = self.directory / run_directory.CHECKPOINTS
        state = {"iteration": iteration, "seed": self.recipe.seed} | self.flow.save()
        save_checkpoint(directory, self.policy, self.trainer, state, self.recipe.checkpoints.keep)
        self.flow.saved([_read_json(each / STATE) for each in complete_checkpoints(directory)])

    def evaluate(self, name: str, iteration: int) -> None:
        label, version = f"iteration {iteration}", self.flow.policy_version
        document = evaluate(self.recipe, self.policy, self.groups, name, label, version, self.directory, self.console.stage)
        self.console.say(f"{name}: success {headline(document)}")
        rates = {"sampled": "eval/success_once", "greedy": "eval/success_once_greedy"}
        self.metrics.write(iteration, {rates[mode]: document[mode]["pc_success"] / 100 for mode in rates if mode in document})

    def evaluated(self, name: str, version: int) -> bool:
        path = self.directory / "evaluation" / f"{name}.json"
        return path.exists() and _read_json(path)["policy_version"] == version

    def compare(self) -> None:
        before, after = (_read_json(self.directory / "evaluation" / f"{name}.json") for name in ("before", "after"))
        write_json(self.directory / "evaluation" / "comparison.json", compare(before, after))

    def summary(self) -> list[str]:
        """Success before and after, where both are known."""
        paths = [self.directory / "evaluation" / f"{name}.json" for name in ("before", "after")]
        return [f"success {path.stem:6s}: {headline(_read_json(path))}" for path in paths if path.exists()]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
