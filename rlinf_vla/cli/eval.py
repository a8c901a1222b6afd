"""Evaluate a checkpoint on the fixed evaluation episodes, or several policies (``sweep.py``)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_vla.config.robot import ROBOT
from rlinf_vla.core.devices import threads
from rlinf_vla.evaluation.evaluate import evaluate, headline
from rlinf_vla.runtime import builders, hooks, out_of_memory, run_directory
from rlinf_vla.runtime.fit import remarks
from rlinf_vla.runtime.open import play_in_process
from rlinf_vla.telemetry.console import stages
from rlinf_vla.training.checkpoint import load_checkpoint


def run(config: DictConfig) -> dict[str, Any]:
    """Write evaluation/<checkpoint>.json and videos to the directory of an evaluation.

    Returns the document of that file, or of a sweep's result.json.

    ``sweep.policies`` selects a sweep, and ``env=robot`` an evaluation on the robot.
    """
    recipe = run_directory.read(config)
    checkpoint = Path(recipe.checkpoint) if recipe.checkpoint else None
    if checkpoint is not None:
        builders.require_weights(recipe, f"no use for checkpoint={checkpoint}")
    if recipe.sweep.policies:
        return hooks.sweep()(recipe, config)
    # without a checkpoint of a run, the recipe's initial model is evaluated
    name = checkpoint.name if checkpoint else "start"
    source = str(checkpoint or recipe.model.checkpoint)
    version = 0
    with ExitStack() as stack:
        stack.enter_context(out_of_memory.explained(recipe, trains=False))
        progress = stack.enter_context(stages())
        if recipe.env.name == ROBOT:
            directory = run_directory.for_evaluation(config, checkpoint)
            control = run_directory.evaluation_file(directory, f"{name}_control")
            play, rate = stack.enter_context(
                hooks.robot().playing_at_robot(recipe, config, control)
            )
            where = f"at {recipe.robot.name}"
        else:
            builders.require_device(recipe)
            groups = stack.enter_context(
                builders.open_envs(recipe, builders.outline(recipe), recipe.rollout.pipeline_depth)
            )
            policy = builders.build_policy(recipe)
            policy.fit_instructions(groups[0].spec.instructions)
            version = load_checkpoint(checkpoint, policy)["policy_version"] if checkpoint else 0
            directory = run_directory.for_evaluation(config, checkpoint)
            for line in remarks(policy.spec, groups[0].spec):
                print(line)
            stack.enter_context(threads(recipe.cluster.rollout_threads))
            timed = builders.timed(recipe, groups, policy.spec.chunk)
            env = timed[0].spec
            play = play_in_process(recipe, policy, timed)
            rate = env.control_hz / env.steps(policy.spec.chunk)
            where = f"of {recipe.env.name}"
        document = evaluate(recipe, play, rate, name, source, version, directory, progress)
    print(f"success of {name} in {recipe.episodes} episodes {where}: {headline(document)}")
    print(
        f"episodes, seeds and machine: {builders.relative(directory / 'evaluation' / f'{name}.json')}"
    )
    return document
