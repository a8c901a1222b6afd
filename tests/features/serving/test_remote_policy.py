"""model=remote at our server in this process: the conformance suite, a control loop, tokens and TLS."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf_vla.config.checks import NO_MODEL
from rlinf_vla.config.errors import Failure, UserError
from rlinf_vla.config.recipe import LoraOptions, ModelConfig, NoAlgorithmConfig, Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Episodes
from rlinf_vla.features.realworld.control_actor import ControlActor
from rlinf_vla.features.realworld.inference import Request
from rlinf_vla.models.pi0.policy import Pi0Options, Pi0Policy
from rlinf_vla.models.remote.options import RemoteOptions
from rlinf_vla.models.remote.policy import RemotePolicy
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.runtime import builders
from rlinf_vla.testing.policy import PolicyConformance
from rlinf_vla.testing.policy_calls import act, observations
from rlinf_vla.testing.toy_env import CounterConfig
from tests.features.realworld.test_control_actor import seen
from tests.features.realworld.virtual_time import VirtualClock
from tests.features.serving.conftest import Running, Start, a_certificate, first_two_chunks
from tests.models.test_pi0 import TINY


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """π₀ with random weights, and no adapters."""
    monkeypatch.setattr(plugins, "models", lambda: {"pi0": Pi0Policy})
    model = ModelConfig(
        "pi0", str(TINY), Pi0Options(random_weights=True, denoise_steps=3), LoraOptions(rank=0)
    )
    found = Recipe(
        name="toy",
        iterations=0,
        seed=7,
        env=CounterConfig(state_dim=8),
        model=model,
        algorithm=NoAlgorithmConfig(),
    )
    builders.build_policy(
        found
    )  # imports what a server would else import while the test waits for it
    return found


def remote(url: str, **options: object) -> RemotePolicy:
    return RemotePolicy.load(
        Path(NO_MODEL), RemoteOptions(url=url, **{"timeout_s": 30.0, "retries": 0} | options)
    )  # type: ignore[arg-type]


@pytest.fixture
def server(start: Start) -> Iterator[Running]:
    with start() as running:
        yield running


class TestRemotePolicy(PolicyConformance):
    """As far as the suite applies: it cannot learn, and tells no probabilities."""

    continuous = True
    test_shapes_and_types = None
    test_evaluate_finds_the_choice_of_act_again = None
    test_temperature_changes_the_distribution = None
    test_greedy_repeats_and_chooses_the_likeliest = None
    test_on_a_gpu_nothing_waits_and_nothing_is_copied = None
    test_gradients_reach_the_backbone_and_the_critic = None
    test_save_and_load = None
    test_supervised_loss_is_per_row_and_can_be_lowered = None

    @pytest.fixture
    def policy(self, server: Running) -> Policy:
        return remote(server.url())

    def test_what_it_returns(self, policy: Policy) -> None:
        inputs = policy.prepare(observations(policy, 3))
        greedy = act(policy, inputs, 0.0)
        sampled = act(policy, inputs)
        assert (
            greedy.actions.shape
            == sampled.log_prob.shape
            == (3, policy.spec.chunk, policy.spec.action_dim)
        )
        assert (
            greedy.actions.dtype == torch.float32
            and greedy.value.shape == (3,)
            and greedy.latent == {}
        )
        assert not torch.equal(greedy.actions, sampled.actions)
        assert policy.value(policy.encode(inputs)).isnan().all() and not list(policy.parameters())

    @pytest.mark.parametrize("call", ["save", "evaluate", "supervised_loss", "pooled"])
    def test_it_does_not_learn(self, policy: Policy, call: str) -> None:
        arguments = {"save": 1, "evaluate": 3, "supervised_loss": 3, "pooled": 1}[call]
        with pytest.raises(UserError, match="it cannot learn, nor be saved"):
            getattr(policy, call)(*[None] * arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_actor_acts_as_with_the_policy_itself(
    server: Running, recipe: Recipe, temperature: float
) -> None:
    """In blocks of its own size, the last of which is smaller."""
    here = builders.build_policy(recipe)
    settings = Settings(5, temperature, 3)
    there = remote(server.url())
    assert there.spec == here.spec
    inputs = Actor(there, settings).prepare(observations(there, 7))
    near = Actor(here, settings).prepare(observations(here, 7))
    first, second = (
        actor.act(given, episodes_of(7), torch.arange(7))
        for actor, given in ((Actor(there, settings), inputs), (Actor(here, settings), near))
    )
    assert torch.equal(first.actions, second.actions)


def episodes_of(count: int) -> Episodes:
    return Episodes(torch.arange(count) % 2, torch.arange(count) * 3, torch.arange(count) % 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_control_loop_gets_the_chunks_of_the_policy_itself(
    server: Running, recipe: Recipe, temperature: float
) -> None:
    """Also those that continue committed actions."""
    first, second = first_two_chunks(remote(server.url()), temperature)
    wanted, continued = first_two_chunks(builders.build_policy(recipe), temperature)
    assert np.array_equal(first.actions, wanted.actions)
    assert np.array_equal(second.actions, continued.actions)
    assert np.array_equal(second.actions[:2], first.actions[1:3]), (
        "it begins with the committed actions"
    )


def test_in_a_control_loop_a_lost_server_is_an_error_at_once(start: Start) -> None:
    with start() as running:
        policy = remote(running.url(), retries=5)
        actor = ControlActor(policy, Settings(3, 0.0, 1), VirtualClock())
        actor(Request(seen(VirtualClock()), "push the cube", 0, 0))
    with pytest.raises(Failure, match=r"does not answer: ws://.* cannot be connected to"):
        actor(Request(seen(VirtualClock()), "push the cube", 1, 1))


def test_a_connection_that_the_server_closed_for_idleness_is_made_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlinf_vla.features.serving.connections import GuardedWebSocket

    monkeypatch.setattr(
        GuardedWebSocket, "handle_pong", lambda link, frame: None
    )  # as if the client did not answer pings
    with start(idle_timeout_s=4.0) as running:
        policy = remote(running.url())
        inputs = policy.prepare(observations(policy, 1))
        first = act(policy, inputs, 0.0)
        wait_until(lambda: "rlinf_vla_sessions 0.0" in running.http("/metrics").body.decode())
        assert torch.equal(act(policy, inputs, 0.0).actions, first.actions)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, "it does not become true"
        time.sleep(0.02)


def test_the_token(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOD", "s3cret")
    monkeypatch.setenv("BAD", "other")
    with start(token="s3cret") as running:
        assert remote(running.url(), token_env="GOOD").spec.chunk
        for options in ({}, {"token_env": "BAD"}):
            with pytest.raises(UserError, match=r"wants a token.*model\.options\.token_env"):
                remote(running.url(), **options)


def test_tls(start: Start, tmp_path: Path) -> None:
    certificate, key = a_certificate(tmp_path)
    with start(certificate=str(certificate), private_key=str(key)) as running:
        url = running.url().replace("ws:", "wss:")
        policy = remote(url, ca_file=str(certificate))
        assert act(policy, policy.prepare(observations(policy, 2))).actions.isfinite().all()
        with pytest.raises(UserError, match=r"no certificate to trust .*model\.options\.ca_file"):
            remote(url)
        with pytest.raises(UserError, match="cannot be read as PEM certificates"):
            remote(url, ca_file=str(key))
