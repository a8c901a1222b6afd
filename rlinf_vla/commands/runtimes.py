"""A recipe's runtime: where its macro flow runs, how its policy is evaluated there, and how a checkpoint of it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vla.commands import session
from rlinf_vla.commands.evaluate import Sweep, sweep_here
from rlinf_vla.flow.base import BaseFlow
from rlinf_vla.flow.off_policy import OffPolicyFlow
from rlinf_vla.flow.runtime import InProcessFlow
from rlinf_vla.protocols import EnvSpec
from rlinf_vla.recipe import Recipe
from rlinf_vla.recipe.robot import ROBOT
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import load_checkpoint, load_earlier, save_checkpoint
from rlinf_vla.training.soft_trainer import SoftTrainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Runtime:
    flow: BaseFlow
    env: EnvSpec
    """Of one environment group."""
    calls_per_s: float
    """Policy calls per second of an episode's own time."""
    play: Sweep
    save: Callable[[dict[str, Any]], None]
    """A checkpoint with this state."""
    state: dict[str, Any]
    """Of the checkpoint that the run goes on from; empty at the beginning."""


def opened(recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say) -> AbstractContextManager[Runtime]:
    """``checkpoint``: to go on from. Raises UserError for what the user can mend, before anything slow where that is possible."""
    if recipe.env.name == ROBOT:
        from rlinf_vla.commands.online import at_robot
        from rlinf_vla.commands.robot_cell import require_shown

        if checkpoint is None:
            require_shown(recipe)
        return at_robot(recipe, directory, checkpoint, say)
    if recipe.cluster.runtime == "ray":
        from rlinf_vla.commands.on_ray import on_ray

        return on_ray(recipe, directory, checkpoint, say)
    return _in_process(recipe, directory, checkpoint, say)


@contextmanager
def _in_process(recipe: Recipe, directory: Path, checkpoint: Path | None, say: Say) -> Iterator[Runtime]:
    policy = session.build_policy(recipe)
    if recipe.checkpoint is not None:
        load_checkpoint(Path(recipe.checkpoint).expanduser(), policy)
    trainer = session.build_trainer(recipe, policy)
    state = load_checkpoint(checkpoint, policy, trainer) if checkpoint is not None else {}
    trainable = sum(parameter.numel() for parameter in trainer.parameters.values())
    say(f"policy {recipe.model.name}: {sum(p.numel() for p in policy.parameters()):,} weights, {trainable:,} of them trained")
    say(f"starting {recipe.env.num_envs} environments ({recipe.env.name})")
    settings = session.actor_settings(recipe, recipe.rollout.temperature)
    threads = partial(session.threads, recipe.cluster.update_threads)
    with session.open_envs(recipe, policy, recipe.rollout.pipeline_depth) as groups, session.threads(recipe.cluster.rollout_threads):
        rewarded = session.rewarded(recipe, groups)
        flow: BaseFlow
        if isinstance(trainer, SoftTrainer):
            replay = directory / run_directory.REPLAY
            flow = OffPolicyFlow(
                trainer.policy, rewarded, trainer, settings, Timeline(), recipe.algorithm, replay, state, update_threads=threads
            )
        else:
            flow = InProcessFlow(
                policy,
                rewarded,
                trainer,
                settings,
                Timeline(),
                reuse_frozen=recipe.cluster.reuse_frozen,
                update_threads=threads,
                staleness=recipe.algorithm.staleness,
                iterations=recipe.iterations,
            )
            flow.remember(load_earlier(checkpoint) if checkpoint is not None else {})

        def save(state: dict[str, Any]) -> None:
            earlier = flow.earlier() if isinstance(flow, InProcessFlow) else None
            save_checkpoint(directory / run_directory.CHECKPOINTS, policy, trainer, state, recipe.checkpoints.keep, earlier)

        spec = groups[0].spec
        yield Runtime(flow, spec, spec.control_hz / policy.spec.chunk, sweep_here(recipe, policy, groups), save, state)
