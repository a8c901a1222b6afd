"""Run ``rlinf-vla train`` for supervised algorithms: imitation learning and success classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from rlinf_vla.algorithms.classifier import ClassifierTraining, Frames
from rlinf_vla.cli.export import write_policy
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.interrupt import Interrupt, deferred_signals
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import Learner, Policy, VectorEnv
from rlinf_vla.evaluation.evaluate import evaluate, headline
from rlinf_vla.evaluation.statistics import wilson_interval
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.open import play_in_process
from rlinf_vla.runtime.supervised import SupervisedFlow
from rlinf_vla.telemetry.console import say, stages
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.report import write_report
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.trainer import OptimizerConfig, Trainer


def learn(recipe: Recipe, directory: Path, checkpoint: Path | None) -> None:
    """Train to ``recipe.iterations`` steps, evaluate, export and report. Raises UserError."""
    write_json(directory / "environment.json", fingerprint())
    config = recipe.algorithm
    algorithm = builders.build_algorithm(recipe)
    learner = builders.build_reward_model(recipe) if isinstance(algorithm, ClassifierTraining) else builders.build_policy(recipe)
    settings = OptimizerConfig(config.learning_rate, config.learning_rate, config.max_grad_norm, config.weight_decay)
    trainer = Trainer(learner, settings, recipe.cluster.micro_batch_size)
    done = load_checkpoint(checkpoint, learner, trainer)["iteration"] if checkpoint else 0
    print(f"recipe {recipe.name} on cluster {recipe.cluster.name} ({recipe.cluster.device}), run directory {builders.relative(directory)}")
    if checkpoint is not None:
        print(f"continuing after iteration {done} from {builders.relative(checkpoint)}")
    with ExitStack() as stack:
        progress = stack.enter_context(stages())
        groups: Sequence[VectorEnv] = ()
        policy = learner if isinstance(learner, Policy) else None
        if config.demonstrations.dataset is None or (policy and recipe.evaluation.before_and_after):
            groups = stack.enter_context(builders.open_envs(recipe, policy, recipe.rollout.pipeline_depth))
        flow = SupervisedFlow(learner, groups, trainer, recipe.seed, progress, print)
        if done < recipe.iterations:
            metrics = stack.enter_context(MetricsLog(directory, resume_step=done if checkpoint else -1))
            with builders.threads(recipe.cluster.update_threads), deferred_signals() as interrupt:
                _run(recipe, algorithm, flow, done, directory, metrics, interrupt)
        if recipe.evaluation.before_and_after:
            with builders.threads(recipe.cluster.rollout_threads):
                print(f"success: {_evaluate(recipe, algorithm, flow, directory, progress)}")
    if not (directory / run_directory.CHECKPOINTS / f"step_{recipe.iterations:06d}" / "adapter").exists():
        _export(learner, directory)
    print(f"report: {builders.relative(write_report(directory))}")


def _run(
    recipe: Recipe, algorithm: Any, flow: SupervisedFlow, done: int, directory: Path, metrics: MetricsLog, interrupt: Interrupt
) -> None:
    show = flow.progress

    def progress(stage: str, fraction: float) -> None:
        show(stage, fraction)
        interrupt.check()  # this iteration has not changed any weights yet

    flow.progress = progress
    for iteration in range(done, recipe.iterations):
        flow.begin(iteration)
        algorithm.iteration(flow)
        step = iteration + 1
        show("learning", step / recipe.iterations)
        if step % 10 == 0:
            metrics.write(step, flow.metrics)
        stop = interrupt.signum is not None
        if step % recipe.checkpoints.every == 0 or step == recipe.iterations or stop:
            state = {"iteration": step, "policy_version": step, "seed": recipe.seed}
            save_checkpoint(directory / run_directory.CHECKPOINTS, flow.learner, flow.trainer, state, recipe.checkpoints.keep)
        if stop:
            say(f"stopped after step {step}; continue with run_dir={builders.relative(directory)} resume=auto")
            interrupt.check()


def _evaluate(recipe: Recipe, algorithm: Any, flow: SupervisedFlow, directory: Path, progress: Callable[[str, float], None]) -> str:
    """Evaluate, write evaluation/after.json, and return the line to print."""
    if isinstance(algorithm, ClassifierTraining):
        frames = flow.label(algorithm.config.demonstrations)
        document = classification_accuracy(flow.learner, frames[algorithm.split(frames)[1]], recipe.cluster.micro_batch_size)
        write_json(directory / "evaluation" / "after.json", document)
        return ", ".join(
            f"{each['pc']:.1f} % of {each['n']} {name} (95 % interval {each['pc_ci95'][0]:.1f} to {each['pc_ci95'][1]:.1f})"
            for name, each in document.items()
        )
    assert isinstance(flow.learner, Policy)
    label = f"iteration {recipe.iterations}"
    play, rate = play_in_process(recipe, flow.learner, flow.groups), flow.groups[0].spec.control_hz / flow.learner.spec.chunk
    return headline(evaluate(recipe, play, rate, "after", label, recipe.iterations, directory, progress))


@torch.no_grad()
def classification_accuracy(model: torch.nn.Module, frames: Frames, rows: int) -> dict[str, Any]:
    """Return the classification accuracy on success frames and on other frames, with intervals."""
    parts = [frames[start : start + rows] for start in range(0, len(frames), rows)]
    right = (torch.cat([model(part.inputs) for part in parts]) > 0) == frames.success
    found = {}
    for name, kind in (("frames of success", frames.success), ("other frames", ~frames.success)):
        n, good = int(kind.sum()), int((right & kind).sum())
        found[name] = {"n": n, "pc": 100 * good / n, "pc_ci95": [100 * each for each in wilson_interval(good, n)]}
    return found


def _export(learner: Learner, directory: Path) -> None:
    use, name = (
        ("model.checkpoint", "policy") if isinstance(learner, Policy) else ("reward=classifier reward.options.checkpoint", "classifier")
    )
    target = directory / name
    target.mkdir(exist_ok=True)
    recipe = OmegaConf.to_container(OmegaConf.load(directory / run_directory.RECIPE))
    write_policy(learner, target, recipe)
    print(f"{name}: {builders.relative(target)} (use it as {use})")
