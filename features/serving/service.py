"""Load a recipe's policy as ``eval`` does, and answer requests with its actions or features."""

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
from rlinf_vla.core.devices import device_of, threads
from rlinf_vla.core.images import blank
from rlinf_vla.core.io import digest_of
from rlinf_vla.core.observation_features import require_colours
from rlinf_vla.core.protocols import Policy, RealTimeChunking
from rlinf_vla.core.types import Episodes, Inputs, Observation, Tensors
from rlinf_vla.features.serving.array_messages import LIMITS, MessageError
from rlinf_vla.features.serving.backbone import ENCODE, SPLIT, digest_of_backbone
from rlinf_vla.features.serving.feature_messages import as_arrays, description
from rlinf_vla.features.serving.observations import (
    Defaults,
    Keys,
    Request,
    chosen,
    flat,
    read_request,
)
from rlinf_vla.rollout.actor import RECORDERS, Actor, nbytes
from rlinf_vla.rollout.split import FeatureServer
from rlinf_vla.runtime import builders, run_directory
from rlinf_vla.runtime.fit import fitted
from rlinf_vla.runtime.recipes import asset_path
from rlinf_vla.training.checkpoint import load_checkpoint
from rlinf_vla.training.lora import acting

ACTORS = 8
"""Pairs of temperature and run seed that are kept; on a GPU each has recorded CUDA graphs."""


@dataclass(frozen=True)
class Answer:
    """Actions, float32 ``[B, C, D]`` or ``[C, D]``, and the seconds of the policy call.

    features: packed features of a backbone, ``[B, ...]``, in place of actions.
    """

    actions: NDArray[np.float32]
    seconds: float
    features: dict[str, NDArray[Any]] | None = None


Outcome = Answer | Exception


class PolicyService:
    """A policy ready to act, in the thread that opened it."""

    def __init__(self, recipe: Recipe, policy: Policy, metadata: dict[str, Any]) -> None:
        """``metadata``: what a client may know of the policy, in plain values.

        Raises UserError for a policy that sees distances.
        """
        require_colours(policy.spec.images, "a client's message")
        self.recipe = recipe
        self.policy = policy
        self.spec = policy.spec
        self.metadata = metadata
        self.defaults = Defaults(recipe.serve.temperature, recipe.seed, most_rows(recipe))
        self.keys = chosen(recipe.serve, policy.spec)
        self.kept: OrderedDict[tuple[float, int], Actor] = OrderedDict()
        """Actors by temperature and run seed, the least used one first."""
        self._graphs = recipe.cluster.cuda_graphs and device_of(policy).type in RECORDERS
        self._backbone = (
            FeatureServer(policy, recipe.cluster.cuda_graphs) if SPLIT in metadata else None
        )
        self._row_bytes = 0
        """Of the features of a row."""

    def request(
        self, message: Any, keys: Keys, seed: int, step: int, encodes: bool = False
    ) -> Request:
        """Return the request of a message; see ``read_request``. Raises MessageError.

        ``encodes``: whether it may ask for features.
        """
        entries = flat(message)
        request = read_request(entries, keys, self.spec, self.defaults, seed, step)
        if encodes and ENCODE in entries:
            self._check_encode(entries[ENCODE], request)
            request = replace(request, encode=True)
        if request.committed is not None and not isinstance(self.policy, RealTimeChunking):
            raise MessageError(
                f"committed: model {self.policy.name} cannot continue committed actions"
            )
        return request

    def _check_encode(self, sha256: Any, request: Request) -> None:
        """Raise MessageError unless this backbone is ``sha256``, and an answer may be so large."""
        if self._backbone is None:
            raise MessageError(
                f"{ENCODE}: model {self.policy.name} {self.policy.split_unsupported}"
            )
        if not isinstance(sha256, str) or sha256 != self.metadata[SPLIT]["backbone"]:
            raise MessageError(
                f"{ENCODE}: the backbone here has another SHA-256 than the one that the head needs"
            )
        if request.committed is not None:
            raise MessageError(
                f"{ENCODE}: features do not depend on committed actions, leave these out"
            )
        if request.rows * self._row_bytes > LIMITS.size:
            most = LIMITS.size // self._row_bytes
            raise MessageError(
                f"{ENCODE}: {request.rows} rows of features take more than {LIMITS.size} bytes: send at most {most} rows"
            )

    def answer(self, requests: Sequence[Request]) -> list[Outcome]:
        """Return what each request gets: an error of one does not reach the others."""
        results: list[Outcome | None] = [None] * len(requests)
        joined: dict[Any, list[tuple[int, Inputs]]] = {}
        for number, request in enumerate(requests):
            try:
                inputs = self._actor(request).prepare(request.observation)
            except UserError as error:
                results[number] = MessageError(str(error))
                continue
            except Exception as error:
                results[number] = error
                continue
            shapes = tuple((name, value.shape[1:]) for name, value in inputs.items())
            key = (
                number
                if request.alone
                else (request.encode or (request.temperature, request.run_seed), shapes)
            )
            joined.setdefault(key, []).append((number, inputs))
        for members in joined.values():
            outcomes = self._call(
                [requests[number] for number, _ in members], [inputs for _, inputs in members]
            )
            for (number, _), outcome in zip(members, outcomes, strict=True):
                results[number] = outcome
        return [
            outcome if outcome is not None else Failure("the policy gave no answer")
            for outcome in results
        ]

    def _call(self, requests: Sequence[Request], inputs: Sequence[Inputs]) -> list[Outcome]:
        began = time.perf_counter()
        encodes = requests[0].encode
        try:
            tensors = (
                self._encode(requests, inputs)
                if encodes
                else {"actions": self._act(requests, inputs).float().cpu()}
            )
            if not all(value.isfinite().all() for value in tensors.values()):
                raise Failure(
                    f"the policy's {'features' if encodes else 'actions'} are not finite numbers"
                )
        except Exception as error:
            return [error] * len(requests)
        seconds = time.perf_counter() - began
        answers = list[Outcome]()
        end = 0
        for request in requests:
            rows = {name: value[end : end + request.rows] for name, value in tensors.items()}
            end += request.rows
            actions = np.empty(0, np.float32) if encodes else rows["actions"].numpy()
            answers.append(
                Answer(
                    actions[0] if request.single and not encodes else actions,
                    seconds,
                    as_arrays(rows) if encodes else None,
                )
            )
        return answers

    def _encode(self, requests: Sequence[Request], inputs: Sequence[Inputs]) -> Tensors:
        assert self._backbone is not None
        features = self._backbone.encode(self._whole(requests, inputs)[0])
        if not self._row_bytes:  # the first call, which warms up
            self.metadata[SPLIT]["features"] = description(features)
            self._row_bytes = nbytes(features) // len(next(iter(features.values())))
        return features

    def _act(self, requests: Sequence[Request], inputs: Sequence[Inputs]) -> torch.Tensor:
        first = requests[0]
        actor = self._actor(requests[0])
        if first.committed is not None:
            return actor.act_onto(
                inputs[0], first.episodes, first.step, first.committed, first.frozen
            ).actions
        whole, rows = self._whole(requests, inputs)
        episodes = Episodes.cat([request.episodes for request in requests])[rows]
        step = torch.cat([request.step for request in requests])[rows]
        return actor.act(whole, episodes, step).actions

    def _whole(
        self, requests: Sequence[Request], inputs: Sequence[Inputs]
    ) -> tuple[Inputs, torch.Tensor]:
        """Return the inputs of all rows, and the numbers of these rows: on a GPU the last one is
        repeated, so that few CUDA graphs are recorded."""
        rows = torch.arange(sum(request.rows for request in requests))
        whole = (
            {name: torch.cat([tensors[name] for tensors in inputs]) for name in inputs[0]}
            if len(inputs) > 1
            else dict(inputs[0])
        )
        if self._graphs and not requests[0].alone and len(rows) & (len(rows) - 1):
            # one recording for each power of two
            rows = torch.arange(min(1 << len(rows).bit_length(), self.defaults.most_rows)).clamp(
                max=len(rows) - 1
            )
            whole = {name: value[rows.to(value.device)] for name, value in whole.items()}
        return whole, rows

    def _actor(self, request: Request) -> Actor:
        """Return the actor of the request's temperature and run seed; the least used one goes."""
        key = (request.temperature, request.run_seed)
        if key not in self.kept:
            settings = builders.actor_settings(self.recipe, request.temperature)
            settings = replace(
                settings, run_seed=request.run_seed, batch_size=self.defaults.most_rows
            )
            self.kept[key] = Actor(self.policy, settings)
        self.kept.move_to_end(key)
        while len(self.kept) > ACTORS:
            self.kept.popitem(last=False)[1].forget()
        return self.kept[key]

    def warm_up(self) -> None:
        """Act once on empty observations, of one row and of the most rows."""
        for rows in sorted({1, self.defaults.most_rows}):
            images = blank(self.spec.images, rows)
            empty = Observation(images, torch.zeros(rows, self.spec.state_dim), ["nothing"] * rows)
            counts = torch.zeros(rows, dtype=torch.int64)
            episodes = Episodes.first_attempts(counts, counts)
            first = Request(
                empty,
                episodes,
                counts,
                self.defaults.temperature,
                self.defaults.run_seed,
                single=False,
            )
            for request in (
                (first, replace(first, encode=True)) if self._backbone is not None else (first,)
            ):
                (outcome,) = self.answer([request])
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
        raise UserError(
            f"recipe={recipe.name} has no model to serve: set model=NAME model.checkpoint=DIR"
        )
    checkpoint = (
        run_directory.checkpoint_at(recipe.checkpoint, "checkpoint") if recipe.checkpoint else None
    )
    chosen(
        recipe.serve, builders.outline(recipe).spec
    )  # before the weights are loaded, which may take minutes
    policy = builders.build_policy(recipe)
    if checkpoint is not None:
        load_checkpoint(checkpoint, policy)
    metadata = described(recipe, policy, checkpoint)
    if policy.split_unsupported is None:
        metadata[SPLIT] = {
            "backbone": digest_of_backbone(policy),
            "options": asdict(recipe.model.options),
        }
    with (
        threads(recipe.cluster.rollout_threads),
        acting(policy, recipe.rollout.rounded_weights),
    ):
        service = PolicyService(recipe, policy, metadata)
        service.warm_up()
        yield service


def described(recipe: Recipe, policy: Policy, checkpoint: Path | None) -> dict[str, Any]:
    """Return what a client may know, in plain values; ``sha256`` is that of the files as in sweeps.

    Paths of this machine are not told.
    """
    model = asset_path(recipe.model.checkpoint)
    spec = policy.spec
    identity = {
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
            "bars": spec.bars,
            "suite": spec.suite,
        },
        "policy": identity,
        "env": {name: env[name] for name in ("name", "convention", "control_mode") if name in env},
        "seed": recipe.seed,
        "temperature": recipe.serve.temperature,
        "max_batch_size": most_rows(recipe),
        "real_time_chunking": isinstance(policy, RealTimeChunking),
    }
