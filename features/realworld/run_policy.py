"""Let a policy act at a robot, with an operator's help, and write the report of the session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from rlinf_vla.config.errors import UserError
from rlinf_vla.evaluation.evaluate import evaluate, headline
from rlinf_vla.features.realworld.cell import require_robot
from rlinf_vla.features.realworld.runtime import playing_at_robot
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.telemetry import robot_report
from rlinf_vla.telemetry.console import stages
from rlinf_vla.telemetry.control_timing import control_table
from rlinf_vla.telemetry.run_files import CONTROL_FILE


def run_policy(config: DictConfig) -> None:
    """Run ``episodes`` episodes with the recipe's policy; nobody learns. Raises UserError.

    It acts in the first of ``evaluation.modes``. The operator may take over and give back; an
    episode succeeds by the scene, the operator's word or the recipe's classifier. Films, outcomes
    and the control loop's timing are in ``run_dir`` (default: a new run), with ``report.html``, and
    the episodes, of which ``robot dataset`` makes a dataset.
    """
    recipe = run_directory.read(config)
    require_robot(recipe, "run")
    checkpoint = Path(recipe.checkpoint) if recipe.checkpoint else None
    if checkpoint is not None:
        builders.require_weights(recipe, f"no use for checkpoint={checkpoint}")
    directory = run_directory.for_evaluation(config, None)
    if (directory / run_directory.RECIPE).exists():
        raise UserError(f"run_dir={directory} holds a run already: choose another run_dir")
    if not recipe.evaluation.modes:
        raise UserError(
            "evaluation.modes=[]: robot run acts in the first one: set evaluation.modes=[greedy]"
        )
    mode = recipe.evaluation.modes[0]
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, modes=[mode]))
    name = checkpoint.name if checkpoint else "start"
    source = str(checkpoint or recipe.model.checkpoint)
    control = directory / CONTROL_FILE
    with run_directory.locked(directory, config, None):
        with (
            stages() as progress,
            playing_at_robot(recipe, config, control, directory / run_directory.EPISODES) as played,
        ):
            play, rate = played
            document = evaluate(recipe, play, rate, name, source, 0, directory, progress)
        _show(recipe.name, document, mode, control)
        report = robot_report.write_report(
            directory, recipe.name, name, document | {"episodes": document[mode]["episodes"]}
        )
    print(
        f"success of {name} in {recipe.episodes} episodes at {recipe.robot.name}: {headline(document)}"
    )
    print(f"report: {builders.relative(report)}")


def _show(name: str, document: dict[str, Any], mode: str, control: Path) -> None:
    console = Console(highlight=False)
    console.print(robot_report.episode_table(document[mode]["episodes"]))
    if (timing := robot_report.read_control(control)) is not None:
        console.print(control_table(timing))
