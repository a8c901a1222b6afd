"""Speed and memory of SAC's update and of its parts: the sampling of the replay, and the ensemble of critics."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.sac import ACTION, SACConfig, critic_loss
from rlinf_vla.algorithms.soft import Critics, SoftPolicy
from rlinf_vla.commands import session
from rlinf_vla.commands.findings import Findings, Work, measured_memory
from rlinf_vla.recipe import Recipe
from rlinf_vla.rollout import synthetic
from rlinf_vla.telemetry.memory import nbytes, saved_for_backward
from rlinf_vla.training.replay import Replay, Transitions
from rlinf_vla.training.soft_trainer import SoftTrainer
from rlinf_vla.types import Tensors

WARMUP, CALLS = 2, 30
SECONDS = 60.0
"""Nothing gets more calls than fit into this time."""
REPLAY_BYTES = 250_000_000
BLOCK = 128
"""Records that are made up; the replay holds them again and again, in places of their own."""
STEP, CRITICS_STEP = "critics and actor", "critics alone"
REPLAY, SINGLY, COPY = "sample of the replay", "record by record", "copy in memory"
ENSEMBLE, SEPARATE = "ensemble of critics", "critics one by one"


def measure(recipe: Recipe, policy: SoftPolicy, directory: Path, say: Callable[[str], None]) -> Findings:
    """``directory``: where the replay may lie for a while."""
    config: SACConfig = recipe.algorithm
    device = policy.log_alpha.device
    found = Findings(f"sac: {config.batch_size} transitions, {config.critics} critics")
    with tempfile.TemporaryDirectory(prefix="replay-", dir=directory) as folder:
        say("filling a replay")
        block = synthetic.records(policy, BLOCK, session.actor_settings(recipe, recipe.rollout.temperature), config.gamma)
        store = filled(Path(folder) / "replay", block, config.replay_capacity)
        batch = store.sample(config.batch_size, torch.Generator().manual_seed(0))
        say("memory of an update")
        _memory(policy, config, batch, found)
        say("steps")
        _steps(policy, config, batch, device, found)
        say("sampling")
        _sampling(store, block, config.batch_size, nbytes([*batch.now.values(), *batch.following.values()]), found)
    say("critics")
    _critics(policy, batch, device, found)
    found.compare(f"{CRITICS_STEP} / {STEP}", CRITICS_STEP, STEP)
    found.compare("replay / record by record", REPLAY, SINGLY)
    found.compare("replay / copy in memory", REPLAY, COPY)
    found.compare("ensemble / critics one by one", ENSEMBLE, SEPARATE)
    found.ratios["seconds of a sample / of a step"] = found.rates[REPLAY].best_s / found.rates[STEP].best_s
    return found


def filled(directory: Path, block: Tensors, capacity: int) -> Replay:
    store = Replay(directory, capacity)
    for _ in range(max(1, min(REPLAY_BYTES // nbytes(block.values()), capacity // BLOCK))):
        store.append(block)
    return store


def _memory(policy: SoftPolicy, config: SACConfig, batch: Transitions, found: Findings) -> None:
    """One step by a trainer of its own says what autograd keeps; the trainer that is measured has made none."""
    weights, records = [*policy.parameters(), *policy.buffers()], [*batch.now.values(), *batch.following.values()]
    first, trainer = SoftTrainer(policy, config), SoftTrainer(policy, config)
    besides = [*weights, *records, *first.target.parameters()]
    activations = saved_for_backward(partial(first.step, batch, torch.Generator(), True), besides)
    del first
    trained, target = list(trainer.parameters.values()), nbytes(trainer.target.parameters())
    update = partial(trainer.step, batch, torch.Generator(), True)
    found.memory[STEP] = measured_memory(update, weights, trained, records, target, activations)


def _steps(policy: SoftPolicy, config: SACConfig, batch: Transitions, device: torch.device, found: Findings) -> None:
    trainer, size = SoftTrainer(policy, config), config.batch_size
    steps = {name: partial(trainer.step, batch, torch.Generator(), actor) for name, actor in ((STEP, True), (CRITICS_STEP, False))}
    found.time({name: Work(step, size, "transitions") for name, step in steps.items()}, device, CALLS, WARMUP, SECONDS)


def _sampling(store: Replay, block: Tensors, size: int, amount: int, found: Findings) -> None:
    """Beside the usual ways: each record read by itself and then stacked, and all of them in memory at once."""
    copies = store.total // BLOCK
    whole = {name: torch.cat([value.cpu()] * copies) for name, value in block.items()}
    generator = torch.Generator()

    def singly() -> None:
        Transitions.cat([store.sample(1, generator) for _ in range(size)])

    def copy() -> None:
        index = torch.randint(store.total - 1, (size,), generator=generator)
        for each in (index, index + 1):
            _ = {name: value.index_select(0, each) for name, value in whole.items()}

    kinds: dict[str, Callable[[], object]] = {REPLAY: partial(store.sample, size, generator), SINGLY: singly, COPY: copy}
    works = {name: Work(call, amount / 1e6, "MB") for name, call in kinds.items()}
    found.time(works, torch.device("cpu"), CALLS, WARMUP, SECONDS)


def _critics(policy: SoftPolicy, batch: Transitions, device: torch.device, found: Findings) -> None:
    """Forward and backward: the ensemble, and a network of its own per member with the same weights, which must say the same."""
    critics, action = policy.critics, batch.now[ACTION].to(device)
    width = members_weights(critics)[0][0].shape[1] - action[0].numel()
    features, target = (torch.randn(len(action), size, generator=torch.Generator().manual_seed(0)).to(device) for size in (width, 1))
    features.requires_grad_()
    members = separate(critics)

    def apart() -> Tensor:
        x = torch.cat([features, action.flatten(1)], dim=1)
        return torch.stack([member(x)[:, 0] for member in members])

    def learn(module: nn.Module, values: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        module.zero_grad(set_to_none=True)
        features.grad = None
        said = values()
        critic_loss(said, target[:, 0]).backward()
        assert features.grad is not None
        return said.detach(), features.grad

    calls: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        ENSEMBLE: partial(learn, critics, lambda: critics(features, action)),
        SEPARATE: partial(learn, members, apart),
    }
    together, one_by_one = (call() for call in calls.values())
    for what, first, second in zip(("values", "gradients"), together, one_by_one, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
        found.differences[f"{what} of the ensemble and of separate critics"] = float((first - second).norm() / second.norm())
    found.time({name: Work(call, len(action), "transitions") for name, call in calls.items()}, device, CALLS, WARMUP, SECONDS)


def members_weights(critics: Critics) -> list[tuple[Tensor, Tensor]]:
    """Weight ``[K, in, out]`` and bias ``[K, 1, out]`` of each layer."""
    parameters = list(critics.parameters())
    return list(zip(parameters[::2], parameters[1::2], strict=True))


def separate(critics: Critics) -> nn.ModuleList:
    """A network of its own for each member, with the same weights."""
    members = nn.ModuleList()
    for k in range(critics.members):
        layers: list[nn.Module] = []
        for weights, biases in members_weights(critics):
            linear = nn.Linear(weights.shape[1], weights.shape[2], device=weights.device)
            linear.load_state_dict({"weight": weights[k].T, "bias": biases[k, 0]})
            layers += [linear, nn.LayerNorm(linear.out_features, elementwise_affine=False), nn.ReLU()]
        members.append(nn.Sequential(*layers[:-2]))
    return members
