"""Peak memory of a recipe's policy and trainer, by component, without allocating any of it.

The policy is built from its config.json on the meta device, and its calls run there. Rows cost
nothing there, so that any size can be counted. A pass takes seconds for billions of weights: the
search for a size counts two small ones, and extrapolates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_vla.algorithms.base import CRITIC, Algorithm
from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.sft import Demonstrations, Draws, SFTConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import OFF_POLICY, ON_POLICY, SUPERVISED, Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.devices import set_fused_kernels
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Tensors, Trajectory
from rlinf_vla.features.planner import synthetic
from rlinf_vla.features.planner.accounting import (
    META,
    Uncounted,
    allocated_gradients,
    peak_bytes,
    repeated,
)
from rlinf_vla.features.planner.replay_memory import ReplayUpdate
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.recipes import asset_path, located
from rlinf_vla.runtime.teacher import load_teacher, require_teacher
from rlinf_vla.training.gradient_checkpointing import checkpoint_blocks, repeated_blocks
from rlinf_vla.training.lora import add_lora, is_lora, network_dtype

FIT_ROWS = (4, 8)
MASTER = 4
"""Bytes of a float32 number: a gradient, each of Adam's moments, and the exact copy of a weight in
lower precision."""


def described(recipe: Recipe) -> tuple[Path, Any, str | None]:
    """Return the directory that describes the recipe's network, and ``model.options`` for it.

    If the checkpoint is not here but is a published one, the package has its sizes, and the third
    value says what is missing. Otherwise raises UserError.
    """
    location, options = recipe.model.checkpoint, recipe.model.options
    try:
        directory = asset_path(location, weights=False)
        if not directory.is_dir():
            raise UserError(
                f"model.checkpoint={location} is not there: give the directory of a checkpoint"
            )
    except UserError as error:
        published = plugins.choose("model", recipe.model.name, plugins.models()).published_sizes(
            location, options
        )
        if published is None:
            raise
        return asset_path(published[0]), published[1], str(error)
    return directory, options, None


def meta_policy(
    recipe: Recipe, directory: Path, options: Any, algorithm: Algorithm
) -> tuple[Policy, Inputs]:
    """Return the recipe's policy, with the networks of ``algorithm``, on the meta device, and the
    prepared inputs of one row (CPU)."""
    policy: Policy = plugins.choose("model", recipe.model.name, plugins.models()).without_weights(
        directory, options
    )
    inputs = policy.prepare(synthetic.observation(policy.spec, 1))
    policy.to(META)
    with torch.device(META):
        add_lora(policy, located(recipe.model.lora, weights=False), recipe.seed)
    if type(algorithm).wrap is Algorithm.wrap:  # no networks of its own
        return policy, inputs
    with torch.no_grad():
        policy.pooled_width = policy.pooled(policy.encode(repeated(inputs, 1))).shape[1]
    return algorithm.wrap(policy, recipe.seed).to(META), inputs


@dataclass(frozen=True)
class Weights:
    """Bytes of a policy's weights and of what training keeps for each."""

    frozen: int
    adapters: int
    full: int
    """Trained in full: heads, modules beside the adapters, or the whole backbone."""
    critic: int
    merged: int
    """Copy of the adapted weights while adapters are merged into them, in main memory."""
    gradients: int
    """In float32, also of weights in lower precision (``training/trainer.py``)."""
    moments: int
    master: int
    """Exact float32 copies of trained weights in lower precision."""

    @property
    def all(self) -> int:
        return self.frozen + self.trained

    @property
    def trained(self) -> int:
        return self.adapters + self.full + self.critic


def weights_of(policy: Policy, pieces: int = 1) -> Weights:
    """Return the bytes on one of ``pieces`` ranks; weights are split by their first dimension."""

    def kept(tensor: Tensor) -> int:
        rows = tensor.shape[0] if tensor.ndim else 1
        return -(-rows // pieces) * (tensor.numel() // max(rows, 1))

    def size(tensors: Iterable[Tensor], element_size: int | None = None) -> int:
        return sum(kept(tensor) * (element_size or tensor.element_size()) for tensor in tensors)

    named = dict(policy.named_parameters())
    trained = {name: value for name, value in named.items() if value.requires_grad}
    adapters = [value for name, value in trained.items() if is_lora(name)]
    critic = [value for name, value in trained.items() if name.startswith(CRITIC)]
    low = [value for value in trained.values() if value.element_size() < MASTER]
    adapted = [value for name, value in named.items() if name.endswith(".base_layer.weight")]
    frozen = [value for value in named.values() if not value.requires_grad]
    return Weights(
        frozen=size(frozen) + sum(buffer.nbytes for buffer in policy.buffers()),
        adapters=size(adapters),
        full=size(trained.values()) - size(adapters) - size(critic),
        critic=size(critic),
        merged=size(adapted) if policy.merge_adapters else 0,
        gradients=size(trained.values(), MASTER),
        moments=size(trained.values(), 2 * MASTER),
        master=size(low, MASTER),
    )


def gathered_bytes(policy: Policy) -> int:
    """Return the bytes of weights that a sharded rank holds whole: two blocks, and all outside."""
    outside, *blocks = (
        sum(parameter.nbytes for parameter in group) for group in _gathered_groups(policy)
    )
    return outside + sum(sorted(blocks)[-2:])


def packed_bytes(policy: Policy) -> int:
    """Return the bytes of the largest group of gradients that a sharded rank sums, in float32."""
    return MASTER * max(
        sum(parameter.numel() for parameter in group if parameter.requires_grad)
        for group in _gathered_groups(policy)
    )


def _gathered_groups(policy: Policy) -> list[list[Tensor]]:
    """Return the weights that are gathered together: all outside blocks; those of each block."""
    blocks: list[list[Tensor]] = [list(block.parameters()) for block in repeated_blocks(policy)]
    inside = {parameter for block in blocks for parameter in block}
    return [[parameter for parameter in policy.parameters() if parameter not in inside], *blocks]


def is_counted(recipe: Recipe) -> bool:
    """Return whether the memory of the recipe's algorithm is counted."""
    return recipe.algorithm.family != SUPERVISED or isinstance(recipe.algorithm, SFTConfig)


class MemoryModel:
    """Bytes of the calls that a recipe's run makes, counted on the meta device."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises UserError if the policy cannot be built, or its algorithm has no such calls."""
        self.recipe = recipe
        self.device = recipe.cluster.device
        set_fused_kernels(recipe.cluster.fused_kernels)
        algorithm = recipe.algorithm
        if not is_counted(recipe):
            raise UserError(
                f"algorithm={algorithm.name}: memory is not counted for supervised algorithms other than sft"
            )
        directory, options, self.missing = described(recipe)
        self.algorithm = builders.build_algorithm(recipe)
        self.policy, self._row = meta_policy(recipe, directory, options, self.algorithm)
        builders.require_augmentation(recipe, self.policy)
        self.on_policy = algorithm.family == ON_POLICY
        self.replay = self._replay() if algorithm.family == OFF_POLICY else None
        """The updates of an off-policy algorithm, which have no micro-batches; None: of others."""
        self.kept = (
            self.on_policy
            and bool(recipe.cluster.reuse_frozen)
            and algorithm.epochs > 1
            and recipe.cluster.trainer_sharding == "none"
        )
        self.weights = cache(partial(weights_of, self.policy))
        self.rollout = cache(self._rollout)
        self.update = cache(self._update)
        self.value_bytes = cache(self._value_bytes)
        self.reference_bytes = cache(self._reference_bytes)

    @property
    def takes_bfloat16(self) -> bool:
        """Whether ``model.options.dtype=bfloat16`` would take half the memory of the network."""
        return (
            hasattr(self.recipe.model.options, "dtype")
            and network_dtype(self.policy) == torch.float32
        )

    def inputs(self, rows: int) -> Inputs:
        return repeated(self._row, rows)

    def act(self, policy: Policy, inputs: Inputs) -> ActionSample:
        """Act as ``rollout/actor.py`` does."""
        first = next(iter(inputs.values()))
        counter = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        return policy.act(
            policy.encode(inputs),
            CounterNoise(0, counter, counter, counter),
            self.recipe.rollout.temperature,
        )

    @torch.no_grad()
    def _rollout(self, rows: int) -> int:
        """Return the peak bytes of a call with ``rows`` rows: inputs, caches, activations."""
        return peak_bytes(lambda: self.act(self.policy, self.inputs(rows)), self.device)

    def _value_bytes(self, rows: int) -> int:
        with torch.no_grad():
            return peak_bytes(
                lambda: self.policy.value(self.policy.encode(self.inputs(rows))), self.device
            )

    def _reference_bytes(self, rows: int) -> int:
        """Return the peak bytes of log-probabilities of ``rows`` rows without gradients."""

        def evaluate(inputs: Inputs, latent: Tensors) -> Any:
            return self.policy.evaluate(inputs, latent, self.recipe.rollout.temperature)

        with torch.no_grad():
            return peak_bytes(
                lambda: evaluate(self.inputs(rows), repeated(self.call.latent, rows)), self.device
            )

    @cached_property
    @torch.no_grad()
    def call(self) -> Trajectory:
        """One policy call ``[1]`` as a rollout stores it."""
        zero = torch.zeros(1, dtype=torch.int64, device=META)
        inputs = self.inputs(1)
        stored = synthetic.stored(inputs, self.act(self.policy, inputs), Episodes(zero, zero, zero))
        return replace(
            stored, reference=stored.log_prob if self.algorithm.keeps_reference else None
        )

    @cached_property
    @torch.no_grad()
    def learnt_inputs(self) -> Inputs:
        """The inputs of one call as updates keep them: with prefixes, if they are reused."""
        return self.policy.precompute(self.call.inputs) if self.kept else self.call.inputs

    @torch.no_grad()
    def _replay(self) -> ReplayUpdate:
        inputs = self.inputs(1)
        sample = self.act(self.policy, inputs)
        if self.missing is None:  # else the student's sizes are not those of its checkpoint
            require_teacher(self.recipe, self.policy)
        teacher = load_teacher(self.recipe, weights=False)
        teacher = None if teacher is None else teacher.to(META)
        return ReplayUpdate(self.algorithm, self.policy, inputs, sample, teacher)

    def batch(self, rows: int) -> Any:
        """Return a micro-batch as an update reads it."""
        if self.replay is not None:
            return self.replay.batch(rows)
        if not self.on_policy:
            shape = (self.policy.horizon, self.policy.spec.action_dim)
            draws = torch.empty(rows, dtype=torch.int64, device=META)
            return Demonstrations(self.inputs(rows), torch.empty(rows, *shape, device=META), draws)
        calls = repeated(replace(self.call, inputs=self.learnt_inputs), rows)
        number = torch.empty(rows, device=META)
        proximal = calls.log_prob if self.recipe.algorithm.decoupled else None
        return Batch(calls, number, number, number, proximal)

    def loss(self, policy: Policy, batch: Any) -> Tensor:
        if self.on_policy:
            return self.algorithm.loss(policy, batch, False)[0]
        noise = CounterNoise(0, *[batch.draws] * 3)
        draws = Draws(lambda draws: noise, lambda draws: noise)
        return self.algorithm.loss(policy, batch, draws)[0]

    def step(self, rows: int, checkpointing: bool = False) -> None:
        """Run forward and backward pass of a micro-batch.

        Of an off-policy algorithm: the passes of one update. Raises Uncounted.
        """
        policy, batch = self.learner(checkpointing), self.batch(rows)
        try:
            if self.replay is not None:
                return self.replay.step(policy, batch)
            loss = self.loss(policy, batch)
        except NotImplementedError:
            fix = "" if self.replay is not None else ": set cluster.micro_batch_size"
            what = f"the loss of algorithm={self.recipe.algorithm.name} has sizes that depend on values"
            raise Uncounted(f"{what}, and its memory is not counted{fix}") from None
        return loss.backward()

    def learner(self, checkpointing: bool) -> Policy:
        return self._checkpointed if checkpointing else self.policy

    @cached_property
    def _checkpointed(self) -> Policy:
        policy = copy.deepcopy(self.policy)
        checkpoint_blocks(policy)
        return policy

    def _update(self, rows: int, checkpointing: bool) -> int:
        """Return the peak bytes of a micro-batch, without the gradients that stay."""
        trained = [
            parameter
            for parameter in self.learner(checkpointing).parameters()
            if parameter.requires_grad
        ]
        with allocated_gradients(trained):
            return peak_bytes(lambda: self.step(rows, checkpointing), self.device)

    def host_bytes_per_call(self) -> tuple[int, int]:
        """Return the bytes of a stored policy call, and of its prefix if the update keeps it."""
        learnt = self.learnt_inputs
        inputs = self.call.inputs
        return _bytes(self.call.tensors()), 0 if learnt is inputs else _bytes(learnt.values())


def estimate(count: Callable[..., int], rows: int, *options: Any) -> float:
    """Return the bytes ``count(rows, *options)`` on the line through two small sizes.

    A peak is the largest of the moments of a pass, each affine in the rows, so it may be above.
    """
    small, large = FIT_ROWS
    low, high = (count(size, *options) for size in FIT_ROWS)
    return low + (high - low) * (rows - small) / (large - small)


def exactly(count: Callable[..., int], rows: int, *options: Any) -> float:
    return count(rows, *options)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
