"""Call a policy in tests: random observations, noise, and comparisons of what it chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlinf_vla.core.devices import device_of
from rlinf_vla.core.images import noise as random_pictures
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import ActionSample, Episodes, Inputs, Observation, Tensors
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.rollout.noise import CounterNoise
from rlinf_vla.rollout.split import FeatureServer, head_weights, load_head, strip_to_head

from .simulated_gpu import captured

INSTRUCTIONS = [
    "push the cube",
    "stack the red cube on the green cube",
    "open the drawer",
    "put the carrot on the plate",
]
TOLERANCE = 1e-5


def observations(policy: Policy, batch: int, seed: int = 0) -> Observation:
    """Return random images and states, on the policy's device, with instructions of different
    lengths, which all differ if the policy sees nothing else."""
    generator = torch.Generator().manual_seed(seed)
    images = random_pictures(policy.spec.images, batch, generator)
    state = torch.randn(batch, policy.spec.state_dim, generator=generator)
    texts = [INSTRUCTIONS[i % len(INSTRUCTIONS)] for i in range(batch)]
    return Observation(
        images, state, texts if images else [f"{text} {i}" for i, text in enumerate(texts)]
    ).to(device_of(policy))


def rows(inputs: Inputs, index: Any) -> Inputs:
    """Return some rows of every input."""
    return {name: value[index] for name, value in inputs.items()}


def noise(seeds: Tensor, device: torch.device | None = None) -> CounterNoise:
    """Return the noise of the first step of episodes with these seeds, int64 ``[B]``.

    ``device``: None is that of ``seeds``.
    """
    seeds = seeds.to(device or seeds.device)
    return CounterNoise(3, torch.zeros_like(seeds), seeds, torch.zeros_like(seeds))


@torch.no_grad()
def act(
    policy: Policy, inputs: Inputs, temperature: float = 1.0, seeds: Tensor | None = None
) -> ActionSample:
    """Call ``policy.act`` with noise by ``seeds``, int64 ``[B]`` (default: 0, 1, ...)."""
    first = next(iter(inputs.values()))
    seeds = torch.arange(len(first)) if seeds is None else seeds
    return policy.act(policy.encode(inputs), noise(seeds, first.device), temperature)


def with_critic(policy: Policy) -> Policy:
    """Perturb the critic, which may start at zero, so that values of rows differ."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.add_(
                (torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.device)
            )
    return policy


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradients that are not zero, by parameter name."""
    return {
        name: p.grad
        for name, p in module.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }


def gradients_of_features(policy: Policy, inputs: Inputs) -> bool:
    """Return whether any weight takes part in ``encode``."""
    return any(value.requires_grad for value in policy.pack(policy.encode(inputs)).values())


def on_device(policy: Policy, device: torch.device, temperature: float) -> Tensors:
    """Return what the policy computes on ``device``, and its gradients.

    On a simulated GPU, acting raises AssertionError for what a CUDA graph cannot record.
    """
    rows = torch.arange(2)
    inputs = policy.prepare(observations(policy, 2))
    actions = (
        torch.linspace(-0.9, 0.9, 2 * policy.horizon * policy.spec.action_dim)
        .reshape(2, policy.horizon, -1)
        .to(device)
    )
    seeds = rows.to(device)
    with captured():
        sample = act(policy, inputs, temperature, seeds)
        with torch.no_grad():
            packed = policy.pack(policy.encode(inputs)) if policy.split_unsupported is None else {}
    tensors = {"actions": sample.actions, "log_prob": sample.log_prob, "value": sample.value}
    evaluated = policy.evaluate(inputs, sample.latent, temperature)
    loss = policy.supervised_loss(policy.precompute(inputs), actions, noise(seeds))
    (
        evaluated.log_prob.sum() + evaluated.entropy.sum() + evaluated.value.sum() + loss.sum()
    ).backward()
    tensors |= {"entropy": evaluated.entropy, "again": evaluated.log_prob, "loss": loss}
    tensors |= {
        f"gradient of {name}": weight.grad
        for name, weight in policy.named_parameters()
        if weight.grad is not None
    }
    policy.zero_grad()
    return {name: value.detach() for name, value in (tensors | packed | sample.latent).items()}


def assert_same_choice(found: ActionSample, expected: ActionSample, exact: bool = True) -> None:
    """Compare two samples within ``TOLERANCE``, and their actions bit for bit if ``exact``.

    A policy on a server tells neither log-probabilities nor values: they are NaN.
    """
    torch.testing.assert_close(
        found.actions, expected.actions, rtol=0, atol=0 if exact else TOLERANCE
    )
    assert found.latent.keys() == expected.latent.keys()
    for name, value in expected.latent.items():
        torch.testing.assert_close(found.latent[name], value, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(
        found.log_prob, expected.log_prob, rtol=0, atol=TOLERANCE, equal_nan=True
    )
    torch.testing.assert_close(found.value, expected.value, rtol=0, atol=TOLERANCE, equal_nan=True)


def over_the_wire(tensors: Tensors) -> Tensors:
    """Return a copy of every tensor, made from its bytes."""
    copies = {}
    for name, value in tensors.items():
        assert value.is_contiguous(), name
        content = bytearray(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        copies[name] = (
            torch.frombuffer(content, dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        )
    return copies


def split(policy: Policy, blank: Policy, settings: Settings) -> Actor:
    """Return an actor with the head alone: ``blank`` gets the head's weights of ``policy``, which
    encodes for it in another place."""
    strip_to_head(blank)
    load_head(blank, over_the_wire(head_weights(policy, policy.state_dict())), device_of(policy))
    server = FeatureServer(policy)
    return Actor(
        blank, settings, lambda inputs: over_the_wire(server.encode(over_the_wire(inputs)))
    )


def assert_the_same_bits(found: Actor, expected: Actor, inputs: Inputs) -> None:
    """Compare actions, log-probabilities and values of two actors bit for bit."""
    count = len(next(iter(inputs.values())))
    episodes = Episodes(torch.arange(count) % 2, torch.arange(count) * 3, torch.arange(count) % 3)
    first, second = (
        actor.act(inputs, episodes, torch.arange(count)) for actor in (found, expected)
    )
    assert first.latent.keys() == second.latent.keys()
    for one, other in (
        *((first.latent[name], second.latent[name]) for name in first.latent),
        (first.actions, second.actions),
    ):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert torch.equal(first.log_prob, second.log_prob) and torch.equal(first.value, second.value)
    assert torch.equal(found.values(inputs), expected.values(inputs))
