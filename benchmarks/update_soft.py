"""Measure speed and memory of the SAC update, of replay sampling and of the critic ensemble."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.feature_policy import Critics
from rlinf_vla.algorithms.off_policy import critic_loss
from rlinf_vla.algorithms.sac import SAC, SACConfig, SACPolicy
from rlinf_vla.benchmarks.roofline import Limits
from rlinf_vla.benchmarks.update_measurements import UpdateMeasurements, Work, measured_memory
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.transitions import ACTION, Transitions
from rlinf_vla.core.types import Tensors
from rlinf_vla.features.planner import synthetic
from rlinf_vla.features.planner.work import work
from rlinf_vla.runtime import builders
from rlinf_vla.telemetry.measurement import nbytes, saved_for_backward
from rlinf_vla.training.replay import Replay
from rlinf_vla.training.trainer import Trainer

WARMUP, CALLS = 2, 30
SECONDS = 60.0
"""Time limit of a measurement: no further turn starts after it."""
REPLAY_BYTES = 250_000_000
BLOCK = 128
"""Synthetic records; the replay stores many copies of them at separate positions."""
STEP, CRITICS_STEP = "critics and actor", "critics alone"
REPLAY, SINGLY, COPY = "sample of the replay", "record by record", "copy in memory"
ENSEMBLE, SEPARATE = "ensemble of critics", "critics one by one"


def measure(
    recipe: Recipe, policy: SACPolicy, limits: Limits, directory: Path, say: Callable[[str], None]
) -> UpdateMeasurements:
    """Measure the SAC update on a device of ``limits``; ``directory``: of a temporary replay."""
    config: SACConfig = recipe.algorithm
    device = policy.log_alpha.device
    measurements = UpdateMeasurements(
        f"sac: {config.batch_size} transitions, {config.critics} critics", limits
    )
    with tempfile.TemporaryDirectory(prefix="replay-", dir=directory) as folder:
        say("filling a replay")
        block = synthetic.records(
            policy, BLOCK, builders.actor_settings(recipe, recipe.rollout.temperature), config.gamma
        )
        store = filled(Path(folder) / "replay", block, config.replay_capacity)
        batch = store.sample(config.batch_size, torch.Generator().manual_seed(0))
        say("memory of an update")
        _memory(policy, config, batch, measurements)
        say("steps")
        _steps(policy, config, batch, device, measurements)
        say("sampling")
        _sampling(
            store,
            block,
            config.batch_size,
            nbytes([*batch.now.values(), *batch.following.values()]),
            measurements,
        )
    say("critics")
    _critics(policy, batch, device, measurements)
    measurements.compare(f"{CRITICS_STEP} / {STEP}", CRITICS_STEP, STEP)
    measurements.compare("replay / record by record", REPLAY, SINGLY)
    measurements.compare("replay / copy in memory", REPLAY, COPY)
    measurements.compare("ensemble / critics one by one", ENSEMBLE, SEPARATE)
    measurements.ratios["seconds of a sample / of a step"] = (
        measurements.rates[REPLAY].best_s / measurements.rates[STEP].best_s
    )
    return measurements


def filled(directory: Path, block: Tensors, capacity: int) -> Replay:
    """Return a replay that holds copies of ``block``, up to ``REPLAY_BYTES`` or ``capacity``."""
    store = Replay(directory, capacity)
    for _ in range(max(1, min(REPLAY_BYTES // nbytes(block.values()), capacity // BLOCK))):
        store.append(block)
    return store


def _trainer(policy: SACPolicy, config: SACConfig) -> Trainer:
    return Trainer(policy, SAC(replace(config, actor_every=2, actor_warmup=0)), config.batch_size)


def _step(trainer: Trainer, batch: Transitions, with_actor: bool) -> Callable[[], dict[str, float]]:
    algorithm = trainer.settings
    assert isinstance(algorithm, SAC)
    return partial(
        algorithm.step, trainer, batch, torch.Generator(), 0, 0 if with_actor else 1, lambda: batch
    )


def _memory(
    policy: SACPolicy, config: SACConfig, batch: Transitions, measurements: UpdateMeasurements
) -> None:
    """A separate trainer measures the activations: the measured one must not have made a step."""
    weights = [*policy.parameters(), *policy.buffers()]
    records = [*batch.now.values(), *batch.following.values()]
    first, trainer = _trainer(policy, config), _trainer(policy, config)
    besides = [*weights, *records, *first.target.parameters()]
    activations = saved_for_backward(_step(first, batch, True), besides)
    del first
    trained, target = list(trainer.parameters.values()), nbytes(trainer.target.parameters())
    update = _step(trainer, batch, True)
    measurements.memory[STEP] = measured_memory(
        update, weights, trained, records, target, activations
    )


def _steps(
    policy: SACPolicy,
    config: SACConfig,
    batch: Transitions,
    device: torch.device,
    measurements: UpdateMeasurements,
) -> None:
    trainer = _trainer(policy, config)
    size = config.batch_size
    steps = {
        name: _step(trainer, batch, actor) for name, actor in ((STEP, True), (CRITICS_STEP, False))
    }
    weights = [*policy.parameters(), *trainer.target.parameters()]
    works = {
        name: Work(step, size, "transitions", work(step, weights)) for name, step in steps.items()
    }
    measurements.time(works, device, CALLS, WARMUP, SECONDS)


def _sampling(
    store: Replay, block: Tensors, size: int, amount: int, measurements: UpdateMeasurements
) -> None:
    """Compare sampling with reading record by record, and with indexing tensors in memory."""
    copies = store.total // BLOCK
    whole = {name: torch.cat([value.cpu()] * copies) for name, value in block.items()}
    generator = torch.Generator()

    def singly() -> None:
        Transitions.cat([store.sample(1, generator) for _ in range(size)])

    def copy() -> None:
        index = torch.randint(store.total - 1, (size,), generator=generator)
        for indices in (index, index + 1):
            _ = {name: value.index_select(0, indices) for name, value in whole.items()}

    kinds: dict[str, Callable[[], object]] = {
        REPLAY: partial(store.sample, size, generator),
        SINGLY: singly,
        COPY: copy,
    }
    works = {name: Work(call, amount / 1e6, "MB") for name, call in kinds.items()}
    measurements.time(works, torch.device("cpu"), CALLS, WARMUP, SECONDS)


def _critics(
    policy: SACPolicy, batch: Transitions, device: torch.device, measurements: UpdateMeasurements
) -> None:
    """Measure forward and backward of the ensemble and of separate networks with the same weights.

    Raises AssertionError if their values or gradients differ.
    """
    critics = policy.critics
    action = batch.now[ACTION].to(device)
    width = members_weights(critics)[0][0].shape[1] - action[0].numel()
    features, target = (
        torch.randn(len(action), size, generator=torch.Generator().manual_seed(0)).to(device)
        for size in (width, 1)
    )
    features.requires_grad_()
    members = separate(critics)

    def apart() -> Tensor:
        x = torch.cat([features, action.flatten(1)], dim=1)
        return torch.stack([member(x)[:, 0] for member in members])

    def learn(module: nn.Module, values: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        module.zero_grad(set_to_none=True)
        features.grad = None
        predictions = values()
        critic_loss(predictions, target[:, 0]).backward()
        assert features.grad is not None
        return predictions.detach(), features.grad

    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        ENSEMBLE: partial(learn, critics, lambda: critics(features, action)),
        SEPARATE: partial(learn, members, apart),
    }
    together, one_by_one = (call() for call in calls.values())
    for what, first, second in zip(("values", "gradients"), together, one_by_one, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
        measurements.differences[f"{what} of the ensemble and of separate critics"] = float(
            (first - second).norm() / second.norm()
        )
    measurements.time(
        {name: Work(call, len(action), "transitions") for name, call in calls.items()},
        device,
        CALLS,
        WARMUP,
        SECONDS,
    )


def members_weights(critics: Critics) -> list[tuple[Tensor, Tensor]]:
    """Return weight ``[K, in, out]`` and bias ``[K, 1, out]`` of each layer."""
    parameters = list(critics.parameters())
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def separate(critics: Critics) -> nn.ModuleList:
    """Return one network per ensemble member, with the member's weights."""
    members = nn.ModuleList()
    for k in range(critics.members):
        layers: list[nn.Module] = []
        for weights, biases in members_weights(critics):
            linear = nn.Linear(weights.shape[1], weights.shape[2], device=weights.device)
            linear.load_state_dict({"weight": weights[k].T, "bias": biases[k, 0]})
            layers += [
                linear,
                nn.LayerNorm(linear.out_features, elementwise_affine=False),
                nn.ReLU(),
            ]
        members.append(nn.Sequential(*layers[:-2]))
    return members
