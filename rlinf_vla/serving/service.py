"""Load a recipe's policy as ``eval`` does, and answer requests with its actions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.array_messages import MessageError
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.io import digest_of
from rlinf_vla.core.protocols import Policy, RealTimeChunking
from rlinf_vla.core.types import Episodes, Inputs, Observation
from rlinf_vla.rollout.actor import RECORDERS, Actor
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.fit import fitted
from rlinf_vla.runtime.recipes import asset_path
from rlinf_vla.serving.observations import Defaults, Keys, Request, chosen, flat, read_request
from rlinf_vla.training.checkpoint import load_checkpoint
from rlinf_vla.training.lora import acting

ACTORS = 8
"""Pairs of temperature and run seed that are kept; on a GPU each has recorded CUDA graphs."""


@dataclass(frozen=True)
class Answer:
    """Actions, float32 ``[B, C, D]`` or ``[C, D]``, and the seconds of the policy call."""

    actions: NDArray[np.float32]
    seconds: float


Outcome = Answer | Exception


class PolicyService:
    """A policy ready to act, in the thread that opened it."""

    def __init__(self, recipe: Recipe, policy: Policy, metadata: dict[str, Any]) -> None:
        """``metadata``: what a client may know of the policy, in plain values."""
        self.recipe, self.policy, self.spec, self.metadata = recipe, policy, policy.spec, metadata
        self.defaults = Defaults(recipe.serve.temperature, recipe.seed, most_rows(recipe))
        self.keys = chosen(recipe.serve, policy.spec)
        self.kept: OrderedDict[tuple[float, int], Actor] = OrderedDict()
        """Actors by temperature and run seed, the least used one first."""
        self._graphs = recipe.cluster.cuda_graphs and device_of(policy).type in RECORDERS

    def request(self, message: Any, keys: Keys, seed: int, step: int) -> Request:
        """Return the request of a message; see ``read_request``. Raises MessageError."""
        request = read_request(flat(message), keys, self.spec, self.defaults, seed, step)
        if request.committed is not None and not isinstance(self.policy, RealTimeChunking):
            raise MessageError(f"committed: model {self.policy.name} cannot continue committed actions")
        return request

    def answer(self, requests: Sequence[Request]) -> list[Outcome]:
        """Return what each request gets: an error of one does not reach the others."""
        found: list[Outcome | None] = [None] * len(requests)
        joined: dict[Any, list[tuple[int, Inputs]]] = {}
        for number, request in enumerate(requests):
            try:
                inputs = self._actor(request).prepare(request.observation)
            except UserError as error:
                found[number] = MessageError(str(error))
                continue
            except Exception as error:
                found[number] = error
                continue
            shapes = tuple((name, value.shape[1:]) for name, value in inputs.items())
            key = number if request.alone else (request.temperature, request.run_seed, shapes)
            joined.setdefault(key, []).append((number, inputs))
        for members in joined.values():
            outcomes = self._call([requests[number] for number, _ in members], [inputs for _, inputs in members])
            for (number, _), outcome in zip(members, outcomes, strict=True):
                found[number] = outcome
        return [outcome if outcome is not None else Failure("the policy gave no answer") for outcome in found]

    def _call(self, requests: Sequence[Request], inputs: Sequence[Inputs]) -> list[Outcome]:
        began = time.perf_counter()
        try:
            actions = self._act(requests, inputs).float().cpu().numpy()
            if not np.isfinite(actions).all():
                raise Failure("the policy's actions are not finite numbers")
        except Exception as error:
            return [error] * len(requests)
        seconds, rows = time.perf_counter() - began, np.cumsum([request.rows for request in requests])[:-1]
        parts = np.split(actions[: sum(request.rows for request in requests)], rows)
        return [Answer(part[0] if each.single else part, seconds) for each, part in zip(requests, parts, strict=True)]

    def _act(self, requests: Sequence[Request], inputs: Sequence[Inputs]) -> torch.Tensor:
        first, actor = requests[0], self._actor(requests[0])
        if first.committed is not None:
            return actor.act_onto(inputs[0], first.episodes, first.step, first.committed, first.frozen).actions
        episodes, step = Episodes.cat([each.episodes for each in requests]), torch.cat([each.step for each in requests])
        whole = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]} if len(inputs) > 1 else dict(inputs[0])
        if self._graphs and not first.alone and len(step) & (len(step) - 1):
            # one recording for each power of two
            rows = torch.arange(min(1 << len(step).bit_length(), self.defaults.most_rows)).clamp(max=len(step) - 1)
            whole, episodes, step = {name: value[rows.to(value.device)] for name, value in whole.items()}, episodes[rows], step[rows]
        return actor.act(whole, episodes, step).actions

    def _actor(self, request: Request) -> Actor:
        """Return the actor of the request's temperature and run seed; the least used one goes."""
        key = (request.temperature, request.run_seed)
        if key not in self.kept:
            settings = builders.actor_settings(self.recipe, request.temperature)
            settings = replace(settings, run_seed=request.run_seed, batch_size=self.defaults.most_rows)
            self.kept[key] = Actor(self.policy, settings)
        self.kept.move_to_end(key)
        while len(self.kept) > ACTORS:
            self.kept.popitem(last=False)[1].forget()
        return self.kept[key]

    def warm_up(self) -> None:
        """Act once on empty observations, of one row and of the most rows."""
        for rows in sorted({1, self.defaults.most_rows}):
            images = {name: torch.zeros(rows, *size, 3, dtype=torch.uint8) for name, size in self.spec.images.items()}
            empty = Observation(images, torch.zeros(rows, self.spec.state_dim), ["nothing"] * rows)
            counts = torch.zeros(rows, dtype=torch.int64)
            episodes = Episodes.first_attempts(counts, counts)
            (outcome,) = self.answer([Request(empty, episodes, counts, self.defaults.temperature, self.defaults.run_seed, single=False)])
            if isinstance(outcome, Exception):
                raise outcome


def most_rows(recipe: Recipe) -> int:
    return recipe.serve.max_batch_size or recipe.rollout.batch_size


@contextmanager
def opened(recipe: Recipe) -> Iterator[PolicyService]:
    """Load the recipe's policy, or its checkpoint, and act once to warm up. Raises UserError.

    PyTorch's number of threads belongs to a thread, so call it where the policy will act.
    """
    if recipe.model.name == NO_MODEL:
        raise UserError(f"recipe={recipe.name} has no model to serve: set model=NAME model.checkpoint=DIR")
    checkpoint = run_directory.checkpoint_at(recipe.checkpoint, "checkpoint") if recipe.checkpoint else None
    chosen(recipe.serve, builders.outline(recipe).spec)  # before the weights are loaded, which may take minutes
    policy = builders.build_policy(recipe)
    if checkpoint is not None:
        load_checkpoint(checkpoint, policy)
    with builders.threads(recipe.cluster.rollout_threads), acting(policy, recipe.rollout.rounded_weights):
        service = PolicyService(recipe, policy, described(recipe, policy, checkpoint))
        service.warm_up()
        yield service


def described(recipe: Recipe, policy: Policy, checkpoint: Path | None) -> dict[str, Any]:
    """Return what a client may know, in plain values; ``sha256`` is that of the files as in sweeps.

    Paths of this machine are not told.
    """
    model, spec = asset_path(recipe.model.checkpoint), policy.spec
    known = {
        "model": recipe.model.name,
        "name": checkpoint.name if checkpoint is not None else model.name,
        "sha256": digest_of(checkpoint or model) if (checkpoint or model).is_dir() else None,
        "model_sha256": digest_of(model) if checkpoint is not None and model.is_dir() else None,
        "dtype": str(next(policy.backbone.parameters()).dtype).removeprefix("torch."),
        "device": device_of(policy).type,
    }
    env = asdict(fitted(recipe.env, spec)) if hasattr(recipe.env, "__dataclass_fields__") else {}
    return {
        "spec": {
            "chunk": spec.chunk,
            "action_dim": spec.action_dim,
            "state_dim": spec.state_dim,
            "images": {name: list(size) for name, size in spec.images.items()},
            "convention": asdict(spec.convention),
            "env": dict(spec.env),
            "remarks": list(spec.remarks),
        },
        "policy": known,
        "env": {name: env[name] for name in ("name", "convention", "control_mode") if name in env},
        "seed": recipe.seed,
        "temperature": recipe.serve.temperature,
        "max_batch_size": most_rows(recipe),
        "real_time_chunking": isinstance(policy, RealTimeChunking),
    }
