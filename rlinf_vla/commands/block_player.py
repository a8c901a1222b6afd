"""Plays blocks of a sweep: in this process, or in one of ``block_workers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlinf_vla import plugins
from rlinf_vla.atomic import write_json
from rlinf_vla.commands import session
from rlinf_vla.commands.evaluate import film
from rlinf_vla.evaluation.blocks import EXPERT, SCRIPTED, START, Block, Entrant, Job, entrants
from rlinf_vla.evaluation.results import episode
from rlinf_vla.evaluation.sweep import EpisodeResult, play_out
from rlinf_vla.protocols import EnvSpec, HasParts, Part, Policy, VectorEnv
from rlinf_vla.recipe import Recipe, asset_path
from rlinf_vla.recipe.checks import NO_MODEL
from rlinf_vla.recipe.evaluation import NO_ALGORITHM
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import task_episodes
from rlinf_vla.rollout.player import Acts
from rlinf_vla.rollout.scripted import Chance, Expert, Unprepared
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training import run_directory
from rlinf_vla.training.checkpoint import COMPLETE, load_checkpoint
from rlinf_vla.training.lora import copy_all, merged_lora
from rlinf_vla.types import UserError

Progress = Callable[[float], None]


def parts_of(recipe: Recipe) -> list[Part]:
    """What a sweep of the recipe plays in. Starts a simulator only where its plug-in cannot say."""
    plugin = plugins.choose("env", recipe.env.name, plugins.envs())
    if isinstance(plugin, HasParts):
        return plugin.parts(recipe.env)
    with session.open_envs(recipe, None, recipe.rollout.pipeline_depth) as groups:
        return [Part(recipe.env.name, groups[0].spec.tasks, recipe.env)]


def contest(recipe: Recipe) -> list[Entrant]:
    """Raises UserError where the recipe has no model for an entrant that needs one, or a directory is not there."""
    policies, model = _policies(recipe), recipe.model
    found = entrants(policies, recipe.evaluation.modes)
    if model.name == NO_MODEL and model.checkpoint != NO_MODEL:
        raise UserError(f"model.checkpoint={model.checkpoint} belongs to no model, recipe={recipe.name} has none: set model=NAME, too")
    for policy in policies:
        if policy not in SCRIPTED and model.name == NO_MODEL:
            raise UserError(f"sweep.policies names {policy}, recipe={recipe.name} has no model: set model=NAME model.checkpoint=DIR")
        if policy == START and not asset_path(model.checkpoint).is_dir():
            raise UserError(f"model.checkpoint={model.checkpoint}: no such directory")
        if policy not in (START, *SCRIPTED) and not Path(policy).expanduser().is_dir():
            raise UserError(f"sweep.policies names {policy}: no such directory (or {START}, {' or '.join(SCRIPTED)})")
    return found


def _policies(recipe: Recipe) -> list[str]:
    """``sweep.policies``, and before them what the recipe asks to evaluate elsewhere, so that no key is without effect: ``checkpoint``,
    or, where nothing learns and a model can be there for no other purpose, that model."""
    listed = list(recipe.sweep.policies)
    if recipe.checkpoint is not None:
        chosen = Path(recipe.checkpoint).resolve()
        return listed if any(Path(each).expanduser().resolve() == chosen for each in listed) else [recipe.checkpoint, *listed]
    unplayed = recipe.algorithm.name == NO_ALGORITHM and recipe.model.name != NO_MODEL and set(listed) <= set(SCRIPTED)
    return [START, *listed] if unplayed else listed


class BlockPlayer:
    """Policy and environments of the last block stay, for the next one may want the same."""

    def __init__(self, recipe: Recipe, entrants: Sequence[Entrant], parts: Sequence[Part]) -> None:
        self._recipe, self._entrants, self._parts = recipe, entrants, parts
        self._opened = ExitStack()
        self._base: _Base | None = None
        self._groups: Sequence[VectorEnv] = ()
        self._part: int | None = None

    def play(self, block: Block, progress: Progress = lambda fraction: None) -> dict[str, Any]:
        """``episodes`` and what they were played on: JSON values."""
        played = self._play(block, False, progress)
        rows = [episode(self._entrants[block.entrant].name, self._parts[block.part].suite, each) for each in played.results]
        policy = None if played.policy is None else _policy_facts(played.policy)
        facts = {"environment": _facts(played.spec), "policy": policy, "lost_simulators": played.losses}
        return {"block": asdict(block)} | facts | {"episodes": rows}

    def film(self, block: Block, directory: Path, progress: Progress = lambda fraction: None) -> None:
        """The same episodes into videos, each as fast as it was."""
        played = self._play(block, True, progress)
        for each in played.results:
            film(each, directory / video_name(block, each.seed), played.spec.control_hz * len(each.frames) / each.steps)

    def keep(self, job: Job, directory: Path, progress: Progress = lambda fraction: None) -> None:
        """Do it, into the sweep's directory."""
        if job.filmed:
            self.film(job.block, directory / VIDEOS, progress)
        else:
            write_json(directory / run_directory.BLOCKS / f"{job.block.name}.json", self.play(job.block, progress))

    def close(self) -> None:
        self._opened.close()
        self._part = None

    def _play(self, block: Block, filmed: bool, progress: Progress) -> _Played:
        entrant, recipe = self._entrants[block.entrant], self._recipe
        base = None if entrant.policy in SCRIPTED else self._load(entrant.policy)
        groups = self._open(block.part)
        if base is not None:
            session.check_fit(base.policy, groups[0])
        before = sum(env.losses() for env in groups)
        episodes = task_episodes(block.task, block.seeds)
        with session.threads(recipe.cluster.rollout_threads), merged_lora(base.policy) if base is not None else nullcontext():
            results = play_out(self._actor(entrant, base), groups, episodes, Timeline(), lambda place: filmed, progress)
        losses = sum(env.losses() for env in groups) - before
        return _Played(results, groups[0].spec, None if base is None else base.policy, losses)

    def _actor(self, entrant: Entrant, base: _Base | None) -> Callable[[VectorEnv], Acts]:
        if base is None:
            return lambda env: Expert(Unprepared(), env) if entrant.policy == EXPERT else Chance(env, self._recipe.seed)
        actor = base.actor(self._recipe, self._recipe.rollout.temperature if entrant.mode == "sampled" else 0.0)
        return lambda env: actor

    def _load(self, name: str) -> _Base:
        """START, a checkpoint of a run, or a model directory."""
        directory = Path(name).expanduser()
        of_run = name != START and (directory / COMPLETE).exists()
        model = self._recipe.model.checkpoint if of_run or name == START else str(directory)
        if self._base is None or self._base.checkpoint != model:
            self._base = None  # its memory is free before the next one takes some
            self._base = _Base(self._recipe, model)
        self._base.become(directory if of_run else None)
        return self._base

    def _open(self, part: int) -> Sequence[VectorEnv]:
        if self._part != part:
            self.close()
            share = replace(self._recipe, env=self._parts[part].config)
            self._groups = self._opened.enter_context(session.open_envs(share, None, self._recipe.rollout.pipeline_depth))
            self._part = part
        return self._groups


VIDEOS = "videos"


def video_name(block: Block, seed: int) -> str:
    return f"{block.entrant:02d}_{block.part:03d}_{block.task:03d}_{seed:07d}.mp4"


class _Played(NamedTuple):
    results: list[EpisodeResult]
    spec: EnvSpec
    policy: Policy | None
    losses: int


class _Base:
    """A policy as ``checkpoint`` has it, which becomes what checkpoints of runs made of it and back: only what trains is read again."""

    def __init__(self, recipe: Recipe, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.policy = session.build_policy(replace(recipe, model=replace(recipe.model, checkpoint=checkpoint)))
        self._trained = {name: p.detach().clone() for name, p in self.policy.named_parameters() if p.requires_grad}
        self._is: Path | None = None
        self._actors: dict[float, Actor] = {}

    def become(self, run_checkpoint: Path | None) -> None:
        """None: as it was loaded."""
        if self._is == run_checkpoint:
            return
        with torch.no_grad():
            own = {name: p for name, p in self.policy.named_parameters() if name in self._trained}
            copy_all(self._trained, own, Path(self.checkpoint))
        if run_checkpoint is not None:
            load_checkpoint(run_checkpoint, self.policy)
        self._is = run_checkpoint

    def actor(self, recipe: Recipe, temperature: float) -> Actor:
        """One for each temperature: on a GPU it has recorded its calls."""
        if temperature not in self._actors:
            self._actors[temperature] = Actor(self.policy, session.actor_settings(recipe, temperature))
        return self._actors[temperature]


def _facts(spec: EnvSpec) -> dict[str, Any]:
    """Of the environments that an episode was played in."""
    sizes = {name: list(size) for name, size in spec.images.items()}
    return {"control_hz": spec.control_hz, "episode_limit": spec.episode_limit, "images": sizes, "stack": dict(spec.stack)}


def _policy_facts(policy: Policy) -> dict[str, Any]:
    sizes = {name: list(size) for name, size in policy.spec.images.items()}
    return {"chunk": policy.spec.chunk, "action_dim": policy.spec.action_dim, "images": sizes}
