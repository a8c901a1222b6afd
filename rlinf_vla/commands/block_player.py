"""Plays blocks of a sweep: in this process, or in one of ``block_workers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla import plugins
from rlinf_vla.commands import session
from rlinf_vla.commands.evaluate import film
from rlinf_vla.evaluation.blocks import EXPERT, RANDOM, SCRIPTED, START, Block, Entrant, Job, entrants
from rlinf_vla.evaluation.results import episode
from rlinf_vla.evaluation.sweep import EpisodeResult, play_out
from rlinf_vla.protocols import EnvSpec, HasParts, Part, Policy, VectorEnv
from rlinf_vla.recipe import Recipe
from rlinf_vla.recipe.checks import NO_MODEL
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import task_episodes
from rlinf_vla.rollout.player import Acts
from rlinf_vla.rollout.scripted import Chance, Expert, Unprepared
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.checkpoint import COMPLETE, load_checkpoint, write_json
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
    found = entrants(recipe.sweep.policies, recipe.evaluation.modes)
    for policy in recipe.sweep.policies:
        if policy not in SCRIPTED and recipe.model.name == NO_MODEL:
            raise UserError(f"sweep.policies names {policy}, recipe={recipe.name} has no model: set model=NAME model.checkpoint=DIR")
        if policy not in (START, *SCRIPTED) and not Path(policy).expanduser().is_dir():
            raise UserError(f"sweep.policies names {policy}: no such directory (or {START}, {' or '.join(SCRIPTED)})")
    return found


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
        results, spec, losses = self._play(block, False, progress)
        rows = [episode(self._entrants[block.entrant].name, self._parts[block.part].suite, each) for each in results]
        scripted = self._base is None or self._entrants[block.entrant].policy in SCRIPTED
        policy = None if scripted or self._base is None else _policy_facts(self._base.policy)
        facts = {"environment": _facts(spec), "policy": policy, "lost_simulators": losses}
        return {"block": asdict(block)} | facts | {"episodes": rows}

    def film(self, block: Block, directory: Path, progress: Progress = lambda fraction: None) -> None:
        """The same episodes into videos."""
        results, spec, _ = self._play(block, True, progress)
        for each in results:
            calls = max(1, len(each.frames))
            film(each, directory / video_name(block, each.seed), spec.control_hz * calls / max(1, each.steps))

    def keep(self, job: Job, directory: Path, progress: Progress = lambda fraction: None) -> None:
        """Do it, into the sweep's directory."""
        if job.filmed:
            self.film(job.block, directory / VIDEOS, progress)
        else:
            write_json(directory / BLOCKS / f"{job.block.name}.json", self.play(job.block, progress))

    def close(self) -> None:
        self._opened.close()
        self._part = None

    def _play(self, block: Block, filmed: bool, progress: Progress) -> tuple[list[EpisodeResult], EnvSpec, int]:
        entrant = self._entrants[block.entrant]
        policy = None if entrant.policy in SCRIPTED else self._load(entrant.policy)
        groups = self._open(block.part)
        if policy is not None:
            session.check_fit(policy, groups[0])
        before = sum(env.losses() for env in groups)
        episodes = task_episodes(block.task, block.seeds)
        with session.threads(self._recipe.cluster.rollout_threads), ExitStack() as stack:
            if policy is not None:
                stack.enter_context(merged_lora(policy))
            results = play_out(self._actor(entrant, policy), groups, episodes, Timeline(), lambda place: filmed, progress)
        return results, groups[0].spec, sum(env.losses() for env in groups) - before

    def _actor(self, entrant: Entrant, policy: Policy | None) -> Callable[[VectorEnv], Acts]:
        if entrant.policy == EXPERT:
            return lambda env: Expert(Unprepared(), env)
        if entrant.policy == RANDOM:
            return lambda env: Chance(env, self._recipe.seed)
        assert policy is not None
        temperature = self._recipe.rollout.temperature if entrant.mode == "sampled" else 0.0
        actor = Actor(policy, session.actor_settings(self._recipe, temperature))
        return lambda env: actor

    def _load(self, name: str) -> Policy:
        """START, a checkpoint of a run, or a model directory."""
        directory = Path(name).expanduser()
        of_run = name != START and (directory / COMPLETE).exists()
        model = self._recipe.model.checkpoint if of_run or name == START else str(directory)
        if self._base is None or self._base.checkpoint != model:
            self._base = None  # its memory is free before the next one takes some
            self._base = _Base.load(self._recipe, model)
        self._base.begin()
        if of_run:
            load_checkpoint(directory, self._base.policy)
        return self._base.policy

    def _open(self, part: int) -> Sequence[VectorEnv]:
        if self._part != part:
            self.close()
            share = replace(self._recipe, env=self._parts[part].config)
            self._groups = self._opened.enter_context(session.open_envs(share, None, self._recipe.rollout.pipeline_depth))
            self._part = part
        return self._groups


BLOCKS, VIDEOS = "blocks", "videos"


def video_name(block: Block, seed: int) -> str:
    return f"{block.entrant:02d}_{block.part:03d}_{block.task:03d}_{seed:07d}.mp4"


@dataclass(frozen=True)
class _Base:
    """A policy as ``checkpoint`` has it, and what of it a run's checkpoint may replace."""

    checkpoint: str
    policy: Policy
    trained: dict[str, Tensor]

    @staticmethod
    def load(recipe: Recipe, checkpoint: str) -> _Base:
        policy = session.build_policy(replace(recipe, model=replace(recipe.model, checkpoint=checkpoint)))
        return _Base(checkpoint, policy, {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad})

    @torch.no_grad()
    def begin(self) -> None:
        """As it was loaded, whatever was copied into it since."""
        copy_all(self.trained, {name: p for name, p in self.policy.named_parameters() if name in self.trained}, Path(self.checkpoint))


def _facts(spec: EnvSpec) -> dict[str, Any]:
    """Of the environments that an episode was played in."""
    sizes = {name: list(size) for name, size in spec.images.items()}
    return {"control_hz": spec.control_hz, "episode_limit": spec.episode_limit, "images": sizes, "stack": dict(spec.stack)}


def _policy_facts(policy: Policy) -> dict[str, Any]:
    sizes = {name: list(size) for name, size in policy.spec.images.items()}
    return {"chunk": policy.spec.chunk, "action_dim": policy.spec.action_dim, "images": sizes}
