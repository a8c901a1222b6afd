"""``rlinf-vla sft``: learn from a scripted expert or a dataset, and write a checkpoint in the model's own layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_vla import recipe as recipes
from rlinf_vla.algorithms.sft import Demonstrations, SFTConfig, imitation_loss, warmup_cosine
from rlinf_vla.commands import session
from rlinf_vla.commands.evaluate import evaluate, headline
from rlinf_vla.commands.export import write_policy
from rlinf_vla.commands.interrupt import Interrupt, deferred
from rlinf_vla.protocols import Policy, VectorEnv
from rlinf_vla.recipe import Recipe
from rlinf_vla.rollout.demonstrations import demonstrate, imitation_noise
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.environment import fingerprint
from rlinf_vla.telemetry.metrics import MetricsLog
from rlinf_vla.telemetry.report import write_report
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint, write_json
from rlinf_vla.training.trainer import Optimisation, Trainer
from rlinf_vla.types import UserError


def run(config: DictConfig) -> None:
    recipe = recipes.read(config)
    if recipe.algorithm.name != "sft":
        raise UserError(f"recipe={recipe.name} is for another verb: use `rlinf-vla train recipe={recipe.name}`")
    directory, checkpoint = run_directory.choose(config)
    with run_directory.opened(directory, config, checkpoint):
        _learn(recipe, directory, checkpoint, OmegaConf.to_yaml(config))


def _learn(recipe: Recipe, directory: Path, checkpoint: Path | None, resolved: str) -> None:
    write_json(directory / "environment.json", fingerprint())
    policy = session.build_policy(recipe)
    config: SFTConfig = recipe.algorithm
    settings = Optimisation(config.learning_rate, config.learning_rate, config.max_grad_norm, config.weight_decay)
    trainer = Trainer(policy, settings, recipe.cluster.micro_batch_size)
    done = load_checkpoint(checkpoint, policy, trainer)["iteration"] if checkpoint else 0
    print(f"recipe {recipe.name} on cluster {recipe.cluster.name} ({recipe.cluster.device}), run directory {session.relative(directory)}")
    with ExitStack() as stack:
        progress = stack.enter_context(stages())
        groups: Sequence[VectorEnv] = ()
        if config.demonstrations.dataset is None or recipe.evaluation.before_and_after:
            groups = stack.enter_context(session.open_envs(recipe, policy, recipe.rollout.pipeline_depth))
        if done < recipe.iterations:
            with session.threads(recipe.cluster.rollout_threads):
                demonstrations, expert = demonstrate(
                    policy, groups, config.demonstrations, recipe.seed, lambda fraction: progress("demonstrations", fraction)
                )
            source = config.demonstrations.dataset or f"{config.demonstrations.episodes} episodes of the expert, under noise"
            success = "" if expert is None else f"; {100 * expert:.0f} % succeeded"
            print(f"{source}: {len(demonstrations)} states{success}")
            metrics = stack.enter_context(MetricsLog(directory, resume_step=done if checkpoint else -1))
            with session.threads(recipe.cluster.update_threads), deferred() as interrupt:
                _optimise(recipe, policy, trainer, demonstrations, done, directory, metrics, progress, interrupt)
        if recipe.evaluation.before_and_after:
            with session.threads(recipe.cluster.rollout_threads):
                document = evaluate(
                    recipe, policy, groups, "after", f"iteration {recipe.iterations}", recipe.iterations, directory, progress
                )
            print(f"success: {headline(document)}")
    if not (directory / run_directory.CHECKPOINTS / f"step_{recipe.iterations:06d}" / "adapter").exists():
        print(f"policy: {session.relative(_export(policy, directory, resolved))} (use it as model.checkpoint)")
    print(f"report: {session.relative(write_report(directory))}")


def _optimise(
    recipe: Recipe,
    policy: Policy,
    trainer: Trainer,
    demonstrations: Demonstrations,
    done: int,
    directory: Path,
    metrics: MetricsLog,
    progress: Callable[[str, float], None],
    interrupt: Interrupt,
) -> None:
    config: SFTConfig = recipe.algorithm

    def save(step: int) -> None:
        state = {"iteration": step, "policy_version": step, "seed": recipe.seed}
        save_checkpoint(directory / run_directory.CHECKPOINTS, policy, trainer, state, recipe.checkpoints.keep)

    loss = partial(imitation_loss, noise=partial(imitation_noise, recipe.seed))
    for step in range(done, recipe.iterations):
        # the batch of a step depends on (seed, step) alone, so that a resumed run draws the same ones
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        batch = demonstrations[torch.randint(len(demonstrations), (config.batch_size,), generator=generator)]
        batch = replace(batch, draws=step * config.batch_size + torch.arange(config.batch_size))
        rate = warmup_cosine(step, config.warmup_steps, config.decay_steps or recipe.iterations)
        values = trainer.step(batch, loss, rate)
        progress("imitation", (step + 1) / recipe.iterations)
        if (step + 1) % 10 == 0:
            metrics.write(step + 1, values | {"sft/learning_rate": rate * config.learning_rate})
        stop = interrupt.signum is not None
        if (step + 1) % recipe.checkpoints.every == 0 or step + 1 == recipe.iterations or stop:
            save(step + 1)
        if stop:
            print(f"stopped after step {step + 1}; go on with run_dir={session.relative(directory)} resume=auto")
            interrupt.check()


def _export(policy: Policy, directory: Path, resolved: str) -> Path:
    target = directory / "policy"
    target.mkdir(exist_ok=True)
    write_policy(policy, target, OmegaConf.to_container(OmegaConf.create(resolved)))
    return target
