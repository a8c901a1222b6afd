"""``rlinf-vla eval``: success of a checkpoint on the fixed evaluation episodes; with ``sweep.policies``, of several (``sweep.py``)."""

from __future__ import annotations

from contextlib import ExitStack

from omegaconf import DictConfig

from rlinf_vla import recipe as recipes
from rlinf_vla.commands import session, sweep
from rlinf_vla.commands.evaluate import evaluate, headline, sweep_here
from rlinf_vla.recipe.robot import ROBOT
from rlinf_vla.telemetry.console import stages
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import load_checkpoint


def run(config: DictConfig) -> None:
    """Writes evaluation/<checkpoint>.json and videos into ``run_dir``, by default the run that the checkpoint belongs to."""
    recipe = recipes.read(config)
    checkpoint = run_directory.checkpoint_at(recipe.checkpoint, "checkpoint") if recipe.checkpoint else None
    if checkpoint is not None:  # found once: a run that trains meanwhile gets newer ones
        recipe.checkpoint = config.checkpoint = str(checkpoint)
    if recipe.sweep.policies:
        sweep.run(config)
        return
    if recipe.env.name == ROBOT:
        from rlinf_vla.commands.online import evaluate_at_robot

        evaluate_at_robot(recipe, config)
        return
    # a checkpoint without adapter or heads of a run is a model directory: the start of the recipe is one
    policy = session.build_policy(recipe)
    version = 0
    if checkpoint:
        version = load_checkpoint(checkpoint, policy)["policy_version"]
    directory = run_directory.for_evaluation(config, checkpoint)
    name = checkpoint.name if checkpoint else "start"
    with ExitStack() as stack:
        progress = stack.enter_context(stages())
        groups = stack.enter_context(session.open_envs(recipe, policy, recipe.rollout.pipeline_depth))
        stack.enter_context(session.threads(recipe.cluster.rollout_threads))
        play, rate = sweep_here(recipe, policy, groups), groups[0].spec.control_hz / policy.spec.chunk
        document = evaluate(recipe, play, rate, name, str(checkpoint or recipe.model.checkpoint), version, directory, progress)
    print(f"success of {name} in {recipe.episodes} episodes of {recipe.env.name}: {headline(document)}")
    print(f"episodes, seeds and machine: {session.relative(directory / 'evaluation' / f'{name}.json')}")
