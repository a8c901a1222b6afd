"""Play the blocks of an evaluation sweep, in this process or in one of ``block_workers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlinf_vla.config.recipe import NO_PROBE, Recipe
from rlinf_vla.core.devices import threads
from rlinf_vla.core.io import write_json
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.evaluation.evaluate import film, temperature_of
from rlinf_vla.features.sweeps.blocks import EXPERT, SCRIPTED, Block, EvalPolicy, Job, Sweep
from rlinf_vla.features.sweeps.sweep_fit import model_location, run_checkpoint, with_model
from rlinf_vla.rollout.actor import Actor
from rlinf_vla.rollout.episodes import task_episodes
from rlinf_vla.rollout.evaluation_episodes import EpisodeResult, play_episode_list, require_starts
from rlinf_vla.rollout.player import ActorProtocol
from rlinf_vla.rollout.scripted_actors import ExpertActor, RandomActor
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.fit import connect, fitted
from rlinf_vla.runtime.out_of_memory import explained
from rlinf_vla.telemetry.timeline import Timeline
from rlinf_vla.training.checkpoint import load_checkpoint
from rlinf_vla.training.lora import acting, copy_all

Progress = Callable[[float], None]
VIDEOS = "videos"


class BlockPlayer:
    """Play blocks; the policy and environments of the last block are kept for the next."""

    losses = 0
    """As of ``BlockWorkers``: there is no process to lose."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._recipe = sweep.recipe
        self._opened = ExitStack()
        self._loaded: _Loaded | None = None
        self._groups: Sequence[VectorEnv] = ()
        self._config: Any = None

    def run(
        self, jobs: Sequence[Job], directory: Path, reached: Callable[[Job, float], None]
    ) -> None:
        """Write the results of jobs, or their videos, into the sweep's directory.

        ``reached(job, fraction)``: called with the completed fraction of each job.
        """
        with explained(self._recipe, trains=False):
            for job in jobs:
                self._carry_out(job, directory, partial(reached, job))

    def _carry_out(self, job: Job, directory: Path, progress: Progress) -> None:
        block = job.block
        if not job.filmed:
            write_json(
                directory / run_directory.BLOCKS / f"{block.name}.json", self.play(block, progress)
            )
            return
        policy = self._open(block)
        for result in self._results(block, policy, True, progress):
            fps = self._groups[0].spec.control_hz * len(result.frames) / result.steps  # real time
            film(result, directory / VIDEOS / f"{block.name_of(result.seed)}.mp4", fps)

    def play(self, block: Block, progress: Progress = lambda fraction: None) -> dict[str, Any]:
        """Return a block's ``episodes`` and facts on policy and environment, as JSON."""
        loaded = self._open(block)
        spec = self._groups[0].spec
        require_starts(spec, self._recipe.episodes)
        losses = sum(env.losses() for env in self._groups)
        results = self._results(block, loaded, False, progress)
        policy = self._sweep.policies[block.policy]
        names = {
            "policy": policy.name,
            "probe": policy.probe or NO_PROBE,
            "suite": self._sweep.suites[block.suite].name,
        }
        facts: dict[str, Any] = {"control_hz": spec.control_hz, "episode_limit": spec.episode_limit}
        return {
            "block": asdict(block),
            "environment": facts | {"images": _sizes(spec.images), "stack": dict(spec.stack)},
            "policy": loaded and loaded.facts(),
            "lost_simulators": sum(env.losses() for env in self._groups) - losses,
            "episodes": [names | result.row() for result in results],
        }

    def close(self) -> None:
        self._opened.close()
        self._config = None

    def _open(self, block: Block) -> _Loaded | None:
        """Open the block's environments and return its policy; None if it is scripted."""
        source = self._sweep.policies[block.policy].source
        loaded = None if source in SCRIPTED else self._load(source)
        config = self._sweep.suites[block.suite].config
        if loaded is not None:
            config = fitted(config, loaded.policy.spec)
        if self._config != config:
            self.close()
            share = replace(self._recipe, env=config)
            self._groups = self._opened.enter_context(
                builders.open_envs(share, None, self._recipe.rollout.pipeline_depth)
            )
            self._config = config
        if loaded is not None:
            connect(loaded.policy, self._groups)
        return loaded

    def _results(
        self, block: Block, loaded: _Loaded | None, filmed: bool, progress: Progress
    ) -> list[EpisodeResult]:
        policy = self._sweep.policies[block.policy]
        actor = self._actor(policy, loaded)
        ready = (
            nullcontext()
            if loaded is None
            else acting(loaded.policy, self._recipe.rollout.rounded_weights)
        )
        with threads(self._recipe.cluster.rollout_threads), ready:
            return play_episode_list(
                actor,
                self._groups,
                task_episodes(block.task, block.seeds),
                Timeline(),
                lambda _place: filmed,
                progress,
                policy.probe,
            )

    def _actor(
        self, policy: EvalPolicy, loaded: _Loaded | None
    ) -> Callable[[VectorEnv], ActorProtocol]:
        if loaded is None:
            return lambda env: (
                ExpertActor(env) if policy.source == EXPERT else RandomActor(env, self._recipe.seed)
            )
        actor = loaded.actor(self._recipe, temperature_of(self._recipe, policy.mode))
        return lambda env: actor

    def _load(self, source: str) -> _Loaded:
        """Load a policy: START, a checkpoint of a run, or a model directory."""
        model = model_location(self._recipe, source)
        if self._loaded is None or self._loaded.model != model:
            self._loaded = None  # free its memory before loading the next one
            self._loaded = _Loaded(self._recipe, model)
        self._loaded.become(run_checkpoint(self._recipe, source))
        return self._loaded


class _Loaded:
    """Policy of a ``model`` directory that can switch to checkpoints of runs and back.

    Switching reads only the trained weights.
    """

    def __init__(self, recipe: Recipe, model: str) -> None:
        self.model = model
        self.policy = builders.build_policy(with_model(recipe, model))
        self._trained = {
            name: p.detach().clone()
            for name, p in self.policy.named_parameters()
            if p.requires_grad
        }
        self._is: Path | None = None
        self._actors: dict[float, Actor] = {}

    def become(self, run_checkpoint: Path | None) -> None:
        """Load a run's checkpoint; None restores the weights of the model directory."""
        if self._is == run_checkpoint:
            return
        with torch.no_grad():
            own = {name: p for name, p in self.policy.named_parameters() if name in self._trained}
            copy_all(self._trained, own, Path(self.model))
        if self.policy.elsewhere is not None:
            self.policy.elsewhere.trained({})
        if run_checkpoint is not None:
            load_checkpoint(run_checkpoint, self.policy)
        self._is = run_checkpoint

    def actor(self, recipe: Recipe, temperature: float) -> Actor:
        """Return the actor of a temperature; on a GPU it holds recorded CUDA graphs."""
        if temperature not in self._actors:
            self._actors[temperature] = Actor(
                self.policy, builders.actor_settings(recipe, temperature)
            )
        return self._actors[temperature]

    def facts(self) -> dict[str, Any]:
        spec = self.policy.spec
        return {"chunk": spec.chunk, "action_dim": spec.action_dim, "images": _sizes(spec.images)}


def _sizes(images: Any) -> dict[str, list[int]]:
    return {name: list(size) for name, size in images.items()}
