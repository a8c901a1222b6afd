"""Conformance suite of a model plug-in: what every ``core.protocols.Policy`` must do."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, device_of, moved
from rlinf_vla.core.distributions import Categorical, Gaussian
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import ActionSample
from rlinf_vla.rollout.actor import Actor, Settings, nbytes, rows_of
from rlinf_vla.rollout.split import head_weights, require_separable

from .config import assert_recipe_node
from .policy_calls import (
    TOLERANCE,
    act,
    assert_same_choice,
    assert_the_same_bits,
    gradients,
    gradients_of_features,
    noise,
    observations,
    on_device,
    rows,
    split,
    with_critic,
)
from .simulated_gpu import GPU, simulated_gpu


class PolicyConformance:
    """Subclasses override ``policy``, and the rest where their policy differs."""

    continuous = False
    """Actions are real numbers, which rounding may change; else they are choices from finite sets,
    with probabilities and an entropy that has a gradient."""
    greedy_is_likeliest = True
    """False if the greedy action is not the mode: a squashed distribution's, or a flow's."""
    state_numbers: int | None = None
    """Size of the prepared state if it is padded; None: ``spec.state_dim``."""

    @pytest.fixture
    def policy(self) -> Policy:
        """Return a small policy; called for every test, each of which may change it."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def on_the_tested_device(self, policy: Policy) -> None:
        """``RLINF_VLA_TEST_DEVICE``: ``cuda`` tests the policy there, instead of on the CPU."""
        policy.to(os.environ.get("RLINF_VLA_TEST_DEVICE", "cpu"))

    def reload(self, policy: Policy, directory: Path) -> Policy:
        """Return ``policy`` after ``save`` and ``load``."""
        directory.mkdir()
        policy.save(directory)
        return type(policy).load(directory, type(policy).Config())

    def blank(self, policy: Any) -> Policy:
        """Return ``policy`` without weights."""
        return type(policy).without_weights(policy.directory, policy.options)

    @pytest.mark.parametrize("temperature", [0.0, 1.3])
    def test_its_head_acts_alone_or_it_says_why_not(
        self, policy: Policy, temperature: float
    ) -> None:
        """With features from elsewhere the head does what the whole policy does, bit for bit."""
        model = type(policy)
        if model.split_unsupported is not None:
            with pytest.raises(
                UserError,
                match=re.escape(
                    f"rollout.split=head: model={model.name} {model.split_unsupported}"
                ),
            ):
                require_separable(model)
            return
        require_separable(model)
        inputs = with_critic(policy).prepare(observations(policy, 7))
        settings = Settings(5, temperature, 3)
        actor = split(policy, self.blank(policy), settings)
        assert_the_same_bits(actor, Actor(policy, settings), inputs)
        packed = policy.pack(policy.encode(inputs))
        assert all(len(value) == 7 for value in packed.values())
        assert (actor.requests, actor.sent, actor.received) == (
            6,
            2 * nbytes(inputs),
            2 * nbytes(packed),
        ), "once to act, once to value"
        for name, value in actor.policy.prepare(observations(policy, 7)).items():
            assert torch.equal(value, inputs[name])
        weights = actor.policy.state_dict()
        assert weights.keys() == head_weights(policy, policy.state_dict()).keys() and not any(
            value.is_meta for value in weights.values()
        )
        if gradients_of_features(policy, inputs):
            assert sum(p.numel() for p in actor.policy.parameters()) < sum(
                p.numel() for p in policy.parameters()
            )

    def test_its_options_fit_into_a_recipe(self, policy: Policy) -> None:
        assert_recipe_node(type(policy).Config())

    def test_shapes_and_types(self, policy: Policy) -> None:
        spec = policy.spec
        batch = 3
        inputs = policy.prepare(observations(policy, batch))
        sample = act(policy, inputs)
        assert sample.actions.shape == sample.log_prob.shape == (batch, spec.chunk, spec.action_dim)
        assert sample.value.shape == (batch,)
        assert sample.actions.dtype == sample.log_prob.dtype == sample.value.dtype == torch.float32
        assert sample.actions.isfinite().all() and sample.log_prob.isfinite().all()
        assert self.continuous or (sample.log_prob <= 0).all()
        assert all(len(value) == batch for value in sample.latent.values())
        evaluation = policy.evaluate(inputs, sample.latent, 1.0)
        assert (
            evaluation.log_prob.shape == evaluation.entropy.shape == sample.log_prob.shape
            and evaluation.value.shape == (batch,)
        )
        assert (
            evaluation.log_prob.dtype
            == evaluation.entropy.dtype
            == evaluation.value.dtype
            == torch.float32
        )
        assert policy.value(policy.encode(inputs)).shape == (batch,)
        assert (
            issubclass(type(policy), Policy)
            and type(policy).name
            and isinstance(type(policy).lora_targets, tuple)
        )

    def test_prepared_inputs_are_cheap_and_each_row_its_own(self, policy: Policy) -> None:
        observed = observations(policy, 5)
        inputs = policy.prepare(observed)
        for value in inputs.values():
            a_few_numbers = value.dtype == torch.float32 and value[0].numel() <= (
                self.state_numbers or policy.spec.state_dim
            )
            assert len(value) == 5 and (
                a_few_numbers or value.dtype in (torch.uint8, torch.int32, torch.int64, torch.bool)
            )
        if policy.state_limit is not None:
            name, limit = policy.state_limit
            assert inputs[name].shape[1] >= policy.spec.state_dim and limit > 0
        for row in range(5):
            for name, value in policy.prepare(rows_of(observed, torch.tensor([row]))).items():
                assert torch.equal(value, inputs[name][row : row + 1])

    @pytest.mark.parametrize("batch", [1, 3, 8])
    @pytest.mark.parametrize("temperature", [1.0, 0.5, 1.6])
    def test_evaluate_finds_the_choice_of_act_again(
        self, policy: Policy, batch: int, temperature: float
    ) -> None:
        inputs = with_critic(policy).prepare(observations(policy, batch))
        sample = act(policy, inputs, temperature)
        assert len(sample.value.unique()) == batch
        torch.testing.assert_close(
            policy.value(policy.encode(inputs)), sample.value, rtol=0, atol=TOLERANCE
        )
        evaluation = policy.evaluate(inputs, sample.latent, temperature)
        torch.testing.assert_close(evaluation.log_prob, sample.log_prob, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(evaluation.value, sample.value, rtol=0, atol=TOLERANCE)

    def test_its_distribution_is_what_evaluate_evaluates(self, policy: Policy) -> None:
        if policy.distributions_unsupported is not None:
            return
        inputs = policy.prepare(observations(policy, 3))
        latent = act(policy, inputs).latent
        found: Any = policy.distributions(inputs, latent, 1.3)
        entropy = policy.evaluate(inputs, latent, 1.3).entropy
        if isinstance(found, Categorical):
            assert found.numbers.shape == (found.log_prob.shape[-1], policy.spec.action_dim)
            own = -(found.log_prob.exp() * found.log_prob).sum(-1)
        else:
            assert isinstance(found, Gaussian)
            own = found.log_std + 0.5 * math.log(2 * math.pi * math.e)
        torch.testing.assert_close(own, entropy, rtol=0, atol=TOLERANCE)
        itself = policy.distributions(inputs, latent, 1.3)
        torch.testing.assert_close(
            found.divergence(itself), torch.zeros_like(entropy), rtol=0, atol=TOLERANCE
        )
        assert (found.divergence(policy.distributions(inputs, latent, 0.7)) > 0).all()

    def test_a_condition_changes_the_prompt_and_guides(self, policy: Policy) -> None:
        if policy.condition_unsupported is not None:
            return
        seen = observations(policy, 3)
        told = replace(seen, instruction=[f"{text} well" for text in seen.instruction])
        policy.fit_instructions(told.instruction)
        inputs, other = policy.prepare(seen), policy.prepare(told)
        prompt = policy.prompt(told)
        assert any(not torch.equal(value, inputs[name]) for name, value in prompt.items())
        for name, value in (inputs | prompt).items():
            assert torch.equal(value, other[name]), "what depends on the instruction is the prompt"
        with torch.no_grad():
            told_features, features = policy.encode(other), policy.encode(inputs)
            seeds = torch.arange(3)
            device = device_of(policy)
            for scale, expected in ((1.0, told_features), (0.0, features)):
                guided = policy.guided(told_features, features, scale)
                torch.testing.assert_close(
                    policy.act(guided, noise(seeds, device), 0.0).actions,
                    policy.act(expected, noise(seeds, device), 0.0).actions,
                    rtol=0,
                    atol=1e-4,
                )

    def test_temperature_changes_the_distribution(self, policy: Policy) -> None:
        inputs = policy.prepare(observations(policy, 4))
        latent = act(policy, inputs).latent
        entropies = [
            policy.evaluate(inputs, latent, temperature).entropy.sum().item()
            for temperature in (0.25, 1.0, 4.0)
        ]
        assert entropies[0] < entropies[1] < entropies[2]

    def test_a_row_does_not_know_its_batch(self, policy: Policy) -> None:
        """The action depends on the row's observation and noise, and on no other row."""
        inputs = with_critic(policy).prepare(observations(policy, 8))
        whole = act(policy, inputs)
        for index in (torch.tensor([5]), torch.tensor([6, 2, 5]), torch.arange(8).flip(0)):
            expected = ActionSample(
                whole.actions[index],
                rows(whole.latent, index),
                whole.log_prob[index],
                whole.value[index],
            )
            assert_same_choice(
                act(policy, rows(inputs, index), seeds=index), expected, exact=not self.continuous
            )

    def test_noise_is_the_only_source_of_chance(self, policy: Policy) -> None:
        inputs = policy.prepare(observations(policy, 4))
        before = torch.get_rng_state()
        first = act(policy, inputs)
        torch.randn(1)
        assert_same_choice(act(policy, inputs), first)
        torch.set_rng_state(before)
        act(policy, inputs)
        assert torch.equal(torch.get_rng_state(), before), "act draws from the global generator"
        others = [act(policy, inputs, seeds=torch.arange(4) + 100 * i).actions for i in range(1, 9)]
        assert any(not torch.equal(other, first.actions) for other in others)

    def test_greedy_repeats_and_chooses_the_likeliest(self, policy: Policy) -> None:
        inputs = policy.prepare(observations(policy, 3))
        greedy = act(policy, inputs, temperature=0.0)
        assert_same_choice(act(policy, inputs, temperature=0.0), greedy)
        evaluation = policy.evaluate(inputs, greedy.latent, 1.0)
        torch.testing.assert_close(evaluation.log_prob, greedy.log_prob, rtol=0, atol=TOLERANCE)
        for i in range(20 if self.greedy_is_likeliest else 0):
            sampled = act(policy, inputs, seeds=torch.arange(3) + 10 * i)
            assert (sampled.log_prob[:, 0, 0] <= greedy.log_prob[:, 0, 0] + TOLERANCE).all()

    def test_acting_leaves_no_gradient_and_no_trace(self, policy: Policy) -> None:
        inputs = policy.prepare(observations(policy, 2))
        copies = {name: value.clone() for name, value in inputs.items()}
        weights = {name: value.clone() for name, value in policy.state_dict().items()}
        act(policy, inputs)
        assert all(torch.equal(inputs[name], value) for name, value in copies.items())
        assert all(torch.equal(policy.state_dict()[name], value) for name, value in weights.items())

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_on_a_gpu_nothing_waits_and_nothing_is_copied(
        self, policy: Policy, temperature: float
    ) -> None:
        """Devices never mix, the results are those of the CPU, and acting can be a CUDA graph."""
        with sdpa_kernel(SDPBackend.MATH):  # as on the simulated GPU
            expected = on_device(with_critic(policy).to(CPU), CPU, temperature)
        with simulated_gpu():
            actual = on_device(policy.to(GPU), GPU, temperature)
            assert all(
                torch.equal(value, expected[name]) for name, value in moved(actual, CPU).items()
            )

    def test_gradients_reach_the_backbone_and_the_critic(self, policy: Policy) -> None:
        inputs = policy.prepare(observations(policy, 3))
        latent = act(policy, inputs).latent
        policy.evaluate(inputs, latent, 1.0).log_prob.sum().backward()
        assert gradients(policy.backbone) and not gradients(policy.value_head)
        assert all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None)
        policy.zero_grad()
        if not self.continuous:
            policy.evaluate(inputs, latent, 1.0).entropy.sum().backward()
            assert gradients(policy.backbone)
            policy.zero_grad()
        # a critic whose last layer starts at zero passes nothing on, but learns
        policy.evaluate(inputs, latent, 1.0).value.sum().backward()
        assert gradients(policy.value_head)

    def test_save_and_load(self, policy: Policy, tmp_path: Path) -> None:
        """The first ``save`` may round the weights; further ones change nothing."""
        inputs = policy.prepare(observations(policy, 3))
        device = device_of(policy)
        once = self.reload(policy, tmp_path / "once").to(device)
        twice = self.reload(once, tmp_path / "twice").to(device)
        assert once.spec == twice.spec == policy.spec
        assert type(once) is type(policy)
        for name, value in once.prepare(observations(policy, 3)).items():
            assert torch.equal(value, inputs[name])
        first, second = act(once, inputs), act(twice, inputs)
        assert torch.equal(first.actions, second.actions) and torch.equal(
            first.log_prob, second.log_prob
        )
        original = policy.evaluate(inputs, first.latent, 1.0).log_prob
        torch.testing.assert_close(first.log_prob, original, rtol=0, atol=0.05)

    def test_supervised_loss_is_per_row_and_can_be_lowered(self, policy: Policy) -> None:
        generator = torch.Generator().manual_seed(5)
        device = device_of(policy)
        inputs = policy.prepare(observations(policy, 4))
        actions = (
            torch.rand(4, policy.horizon, policy.spec.action_dim, generator=generator) * 2 - 1
        ).to(device)
        before = policy.supervised_loss(inputs, actions, noise(torch.arange(4), device))
        assert before.shape == (4,) and before.dtype == torch.float32
        for row in range(4):
            alone = policy.supervised_loss(
                rows(inputs, slice(row, row + 1)),
                actions[row : row + 1],
                noise(torch.tensor([row]), device),
            )
            torch.testing.assert_close(alone, before[row : row + 1], rtol=0, atol=1e-4)
        optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
        for _ in range(6):
            optimizer.zero_grad()
            policy.supervised_loss(
                inputs, actions, noise(torch.arange(4), device)
            ).mean().backward()
            optimizer.step()
        assert (
            policy.supervised_loss(inputs, actions, noise(torch.arange(4), device)).mean()
            < before.mean() - 0.1
        )


class DiscretePolicyConformance(PolicyConformance):
    """For policies that choose actions from finite sets: also checks their probabilities.
    Subclasses override ``choices`` as well."""

    draws = 4096
    block = 512

    def choices(self, latent: dict[str, Tensor]) -> Tensor:
        """Return the index of each choice, int64 ``[B, C, D]``; -1 where there was none."""
        raise NotImplementedError

    @torch.no_grad()
    def test_samples_follow_the_reported_probabilities(self, policy: Policy) -> None:
        one = policy.prepare(observations(policy, 1))
        inputs = {name: value.expand(self.block, *value.shape[1:]) for name, value in one.items()}
        starts = range(0, self.draws, self.block)
        samples = [
            act(policy, inputs, seeds=torch.arange(start, start + self.block)) for start in starts
        ]
        choices = torch.cat([self.choices(sample.latent) for sample in samples])
        log_prob = torch.cat([sample.log_prob for sample in samples]).double()

        self.chi_square(choices[:, 0, 0], log_prob[:, 0, 0].exp())
        # whatever was chosen before: E[1{choice = k} / p(choice)] = 1 for each k, if one is chosen
        for k in choices[choices >= 0].unique():
            self.assert_mean(
                (choices == k) * (-log_prob).exp() - (choices >= 0).double(), torch.tensor(0.0)
            )
        entropy = policy.evaluate(one, rows(samples[0].latent, slice(0, 1)), 1.0).entropy[0, 0, 0]
        self.assert_mean(-log_prob[:, 0, 0], entropy)

    def chi_square(self, choice: Tensor, probability: Tensor) -> None:
        """Compare frequencies of a chunk's first action, which depends on the observation alone."""
        statistic = 0.0
        total = 0.0
        freedom = len(choice.unique()) - 1
        for k in choice.unique():
            of_choice = probability[choice == k]
            assert (of_choice - of_choice[0]).abs().max() < TOLERANCE, "one choice, one probability"
            expected = self.draws * float(of_choice[0])
            statistic += (len(of_choice) - expected) ** 2 / expected
            total += float(of_choice[0])
        assert total < 1 + TOLERANCE and freedom > 0
        statistic += self.draws * (1 - total)  # choices that were never seen
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5

    def assert_mean(self, draws: Tensor, expected: Tensor) -> None:
        """Compare a mean within five standard errors."""
        error = draws.std(0) / len(draws) ** 0.5
        assert ((draws.mean(0) - expected).abs() <= 5 * error + TOLERANCE).all()
