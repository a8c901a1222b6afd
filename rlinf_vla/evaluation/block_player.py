"""Run blocks of an evaluation sweep, in this process or in one of ``block_workers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlinf_vla.config.algorithm import NO_ALGORITHM
from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import EnvSpec, HasSuites, Policy, Suite, VectorEnv
from rlinf_vla.evaluation.blocks import EXPERT, SCRIPTED, START, Block, EvalPolicy, Job, eval_policies
from rlinf_vla.evaluation.evaluate import film
from rlinf_vla.evaluation.results import episode
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import task_episodes
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_episode_list
from rlinf_vla.rollout.player import ActorProtocol
from rlinf_vla.rollout.scripted_actors import ExpertActor, RandomActor, Unprepared
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.recipes import asset_path
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.checkpoint import COMPLETE, load_checkpoint
from rlinf_vla.training.lora import copy_all, merged_lora

Progress = Callable[[float], None]


def suites_of(recipe: Recipe) -> list[Suite]:
    """Return the suites of a sweep. Starts a simulator only if its plug-in cannot list them."""
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    if isinstance(plugin, HasSuites):
        return plugin.suites(recipe.env)
    with builders.open_envs(recipe, None, recipe.rollout.pipeline_depth) as groups:
        return [Suite(recipe.env.name, groups[0].spec.tasks, recipe.env)]


def eval_policies_of(recipe: Recipe) -> list[EvalPolicy]:
    """Return the policies under evaluation.

    Raises UserError if a policy needs a model and the recipe has none, or a directory is missing.
    """
    policies, model = _policies(recipe), recipe.model
    found = eval_policies(policies, recipe.evaluation.modes)
    if model.name == NO_MODEL and model.checkpoint != NO_MODEL:
        raise UserError(f"model.checkpoint={model.checkpoint} needs a model, and recipe={recipe.name} has none: set model=NAME, too")
    for policy in policies:
        if policy not in SCRIPTED and model.name == NO_MODEL:
            raise UserError(f"sweep.policies names {policy}, but recipe={recipe.name} has no model: set model=NAME model.checkpoint=DIR")
        if policy == START and not asset_path(model.checkpoint).is_dir():
            raise UserError(f"model.checkpoint={model.checkpoint}: no such directory")
        if policy not in (START, *SCRIPTED) and not Path(policy).expanduser().is_dir():
            raise UserError(f"sweep.policies names {policy}: no such directory (or {START}, {' or '.join(SCRIPTED)})")
    return found


def _policies(recipe: Recipe) -> list[str]:
    """Return ``sweep.policies``, preceded by a policy that another key names.

    That is ``checkpoint``; or the model, if there is no algorithm and all listed policies are
    scripted, because the model would otherwise have no effect.
    """
    listed = list(recipe.sweep.policies)
    if recipe.checkpoint is not None:
        chosen = Path(recipe.checkpoint).resolve()
        return listed if any(Path(each).expanduser().resolve() == chosen for each in listed) else [recipe.checkpoint, *listed]
    unplayed = recipe.algorithm.name == NO_ALGORITHM and recipe.model.name != NO_MODEL and set(listed) <= set(SCRIPTED)
    return [START, *listed] if unplayed else listed


class BlockPlayer:
    """Run blocks; the policy and environments of the last block are kept for the next."""

    def __init__(self, recipe: Recipe, policies: Sequence[EvalPolicy], suites: Sequence[Suite]) -> None:
        self._recipe, self._policies, self._suites = recipe, policies, suites
        self._opened = ExitStack()
        self._base: _Base | None = None
        self._groups: Sequence[VectorEnv] = ()
        self._suite: int | None = None

    def play(self, block: Block, progress: Progress = lambda fraction: None) -> dict[str, Any]:
        """Run a block; returns its ``episodes`` and facts on policy and environment, as JSON."""
        played = self._play(block, False, progress)
        rows = [episode(self._policies[block.policy].name, self._suites[block.suite].name, each) for each in played.results]
        policy = None if played.policy is None else _policy_facts(played.policy)
        facts = {"environment": _facts(played.spec), "policy": policy, "lost_simulators": played.losses}
        return {"block": asdict(block)} | facts | {"episodes": rows}

    def film(self, block: Block, directory: Path, progress: Progress = lambda fraction: None) -> None:
        """Run the same episodes again and write a video of each, at its real speed."""
        played = self._play(block, True, progress)
        for each in played.results:
            film(each, directory / video_name(block, each.seed), played.spec.control_hz * len(each.frames) / each.steps)

    def keep(self, job: Job, directory: Path, progress: Progress = lambda fraction: None) -> None:
        """Run a job and write its result into the sweep's directory."""
        if job.filmed:
            self.film(job.block, directory / VIDEOS, progress)
        else:
            write_json(directory / run_directory.BLOCKS / f"{job.block.name}.json", self.play(job.block, progress))

    def close(self) -> None:
        self._opened.close()
        self._suite = None

    def _play(self, block: Block, filmed: bool, progress: Progress) -> _Played:
        policy, recipe = self._policies[block.policy], self._recipe
        base = None if policy.source in SCRIPTED else self._load(policy.source)
        groups = self._open(block.suite)
        if base is not None:
            builders.check_fit(base.policy, groups[0])
        before = sum(env.losses() for env in groups)
        episodes = task_episodes(block.task, block.seeds)
        with builders.threads(recipe.cluster.rollout_threads), merged_lora(base.policy) if base is not None else nullcontext():
            results = play_episode_list(self._actor(policy, base), groups, episodes, Timeline(), lambda place: filmed, progress)
        losses = sum(env.losses() for env in groups) - before
        return _Played(results, groups[0].spec, None if base is None else base.policy, losses)

    def _actor(self, policy: EvalPolicy, base: _Base | None) -> Callable[[VectorEnv], ActorProtocol]:
        if base is None:
            return lambda env: ExpertActor(Unprepared(), env) if policy.source == EXPERT else RandomActor(env, self._recipe.seed)
        actor = base.actor(self._recipe, self._recipe.rollout.temperature if policy.mode == "sampled" else 0.0)
        return lambda env: actor

    def _load(self, name: str) -> _Base:
        """Load a policy: START, a checkpoint of a run, or a model directory."""
        directory = Path(name).expanduser()
        of_run = name != START and (directory / COMPLETE).exists()
        model = self._recipe.model.checkpoint if of_run or name == START else str(directory)
        if self._base is None or self._base.checkpoint != model:
            self._base = None  # free its memory before loading the next one
            self._base = _Base(self._recipe, model)
        self._base.become(directory if of_run else None)
        return self._base

    def _open(self, suite: int) -> Sequence[VectorEnv]:
        if self._suite != suite:
            self.close()
            share = replace(self._recipe, env=self._suites[suite].config)
            self._groups = self._opened.enter_context(builders.open_envs(share, None, self._recipe.rollout.pipeline_depth))
            self._suite = suite
        return self._groups


VIDEOS = "videos"


def video_name(block: Block, seed: int) -> str:
    return f"{block.policy:02d}_{block.suite:03d}_{block.task:03d}_{seed:07d}.mp4"


class _Played(NamedTuple):
    results: list[EpisodeResult]
    spec: EnvSpec
    policy: Policy | None
    losses: int


class _Base:
    """Policy of a model ``checkpoint`` that can switch to checkpoints of runs and back.

    Switching reads only the trained weights.
    """

    def __init__(self, recipe: Recipe, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.policy = builders.build_policy(replace(recipe, model=replace(recipe.model, checkpoint=checkpoint)))
        self._trained = {name: p.detach().clone() for name, p in self.policy.named_parameters() if p.requires_grad}
        self._is: Path | None = None
        self._actors: dict[float, Actor] = {}

    def become(self, run_checkpoint: Path | None) -> None:
        """Load a run's checkpoint; None restores the weights of the model checkpoint."""
        if self._is == run_checkpoint:
            return
        with torch.no_grad():
            own = {name: p for name, p in self.policy.named_parameters() if name in self._trained}
            copy_all(self._trained, own, Path(self.checkpoint))
        if run_checkpoint is not None:
            load_checkpoint(run_checkpoint, self.policy)
        self._is = run_checkpoint

    def actor(self, recipe: Recipe, temperature: float) -> Actor:
        """Return the actor of a temperature; on a GPU it holds recorded CUDA graphs."""
        if temperature not in self._actors:
            self._actors[temperature] = Actor(self.policy, builders.actor_settings(recipe, temperature))
        return self._actors[temperature]


def _facts(spec: EnvSpec) -> dict[str, Any]:
    """Return facts on the environments of a block, for its results."""
    sizes = {name: list(size) for name, size in spec.images.items()}
    return {"control_hz": spec.control_hz, "episode_limit": spec.episode_limit, "images": sizes, "stack": dict(spec.stack)}


def _policy_facts(policy: Policy) -> dict[str, Any]:
    sizes = {name: list(size) for name, size in policy.spec.images.items()}
    return {"chunk": policy.spec.chunk, "action_dim": policy.spec.action_dim, "images": sizes}
