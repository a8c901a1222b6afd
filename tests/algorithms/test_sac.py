"""SAC's densities, targets and gradients against slow references, and its flow on the counter world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_vla.algorithms.advantages import GAMMA_UNITS
from rlinf_vla.algorithms.augmentation import random_shift
from rlinf_vla.algorithms.feature_policy import Critics
from rlinf_vla.algorithms.off_policy import critic_loss
from rlinf_vla.algorithms.sac import (
    SAC,
    SACConfig,
    SACPolicy,
    actor_loss,
    alpha_loss,
    soft_target,
    squash,
)
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.transitions import Transitions
from rlinf_vla.runtime.off_policy import OffPolicyFlow
from rlinf_vla.testing.policy_calls import noise, observations
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.lora import add_lora
from rlinf_vla.training.trainer import Trainer
from tests.algorithms.sac_runs import flow, policy, run
from tests.algorithms.sac_step import sac_step
from tests.models.tiny_openvla import tiny
from tests.runtime.here import replays_of

RATES = {"learning_rate": 1e-3, "value_learning_rate": 1e-3}
CONFIG = SACConfig(
    episodes=4, updates_per_step=0.3, batch_size=16, critics=4, hidden=32, shift=0, **RATES
)
seeds = st.integers(0, 2**32 - 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.floats(-1.5, 1.5), st.floats(-2, 0.5))
def test_a_squashed_gaussian_integrates_to_one(mean: float, log_std: float) -> None:
    pre = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    action, log_prob = squash(pre, torch.tensor(mean), torch.tensor(log_std, dtype=torch.float64))
    assert np.trapezoid(log_prob.exp().numpy(), action.numpy()) == pytest.approx(1, abs=1e-3)


@given(seeds)
def test_its_density_by_change_of_variables(seed: int) -> None:
    pre, mean, log_std = normal(3, 5, seed=seed)
    reference = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()),
        [torch.distributions.TanhTransform(cache_size=1)],
    )
    action, log_prob = squash(pre, mean, log_std)
    torch.testing.assert_close(log_prob, reference.log_prob(reference.transforms[0](pre)))
    assert torch.equal(action, pre.tanh())


def test_log_probabilities_are_finite_in_the_tails() -> None:
    pre = torch.tensor([-60.0, 60.0], requires_grad=True)
    log_prob = squash(pre, torch.zeros(2), torch.zeros(2))[1]
    (gradient,) = torch.autograd.grad(log_prob.sum(), pre)
    assert log_prob.isfinite().all() and gradient.isfinite().all()


def test_an_ensemble_equals_its_members() -> None:
    critics = Critics(5, 6, 8)
    features = normal(7, 4).float()
    action = normal(7, 1, 2, seed=1).float()
    expected = []
    for member in range(5):
        x = torch.cat([features, action.flatten(1)], 1)
        for index, layer in enumerate(critics.layers):
            x = x @ layer.weight[member] + layer.bias[member]
            if index < 2:
                x = nn.functional.layer_norm(x, x.shape[-1:]).relu()
        expected.append(x[:, 0])
    torch.testing.assert_close(critics(features, action), torch.stack(expected))
    chosen = torch.tensor([3, 1])
    torch.testing.assert_close(
        critics(features, action, chosen), torch.stack([expected[3], expected[1]])
    )


@given(seeds, st.booleans())
def test_targets_against_a_loop(seed: int, backup: bool) -> None:
    reward, discount, log_prob = normal(3, 6, seed=seed)
    discount = torch.where(discount > 0.3, 0.9, torch.where(discount > -0.3, 0.81, 0.0))
    values = normal(2, 6, seed=seed + 1)
    values[:, discount == 0] = float("nan")  # the observation after a terminated episode is ignored
    found = soft_target(reward, discount, values, log_prob, torch.tensor(0.2), backup)
    for i in range(6):
        after = min(float(values[0, i]), float(values[1, i])) - (
            0.2 * float(log_prob[i]) if backup else 0
        )
        expected = float(reward[i]) + (float(discount[i]) * after if discount[i] else 0)
        assert float(found[i]) == pytest.approx(expected, abs=1e-6)


@given(seeds)
def test_losses_against_loops(seed: int) -> None:
    values = normal(3, 5, seed=seed)
    target = normal(5, seed=seed + 1)
    log_prob = normal(5, seed=seed + 2)
    squares = [
        [(float(values[k, b]) - float(target[b])) ** 2 / 2 for b in range(5)] for k in range(3)
    ]
    assert float(critic_loss(values, target)) == pytest.approx(sum(sum(row) / 5 for row in squares))
    for aggregate, value in (("mean", values.mean(0)), ("min", values.min(0).values)):
        expected = sum(0.3 * float(log_prob[b]) - float(value[b]) for b in range(5)) / 5
        assert float(
            actor_loss(values, log_prob, torch.tensor(0.3, dtype=torch.float64), aggregate)
        ) == pytest.approx(expected)


@pytest.mark.parametrize(("entropy", "rises"), [(-3.0, True), (-1.0, False)])
def test_alpha_rises_while_the_entropy_is_too_low(entropy: float, rises: bool) -> None:
    log_alpha = torch.tensor(-1.0, requires_grad=True)
    alpha_loss(log_alpha, torch.full((4,), -entropy), -2.0).backward()
    assert log_alpha.grad is not None and (float(log_alpha.grad) < 0) == rises


def test_random_shifts_against_a_loop() -> None:
    images = torch.randint(
        0, 256, (3, 6, 5, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    shifts = torch.tensor([[0, 0], [2, 2], [4, 1]])
    found = random_shift(images, shifts, 2)
    for b, (down, right) in enumerate(shifts.tolist()):
        for y in range(6):
            for x in range(5):
                source = images[b, min(max(y + down - 2, 0), 5), min(max(x + right - 2, 0), 4)]
                assert torch.equal(found[b, y, x], source)
    assert torch.equal(found[1], images[1]), "the middle one is none"


def transitions(seed: int = 0, size: int = 8) -> Transitions:
    generator = torch.Generator().manual_seed(seed)

    def records() -> dict[str, Tensor]:
        image = torch.randint(0, 256, (size, 8, 8, 3), generator=generator, dtype=torch.uint8)
        action = torch.rand(size, 1, 4, generator=generator) * 2 - 1
        reward = torch.randn(size, generator=generator)
        return {
            "image": image,
            "action": action,
            "reward": reward,
            "discount": torch.full((size,), 0.9),
            "acted": torch.ones(size).bool(),
        }

    return Transitions(records(), records())


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}


def test_each_loss_trains_its_own_modules() -> None:
    subject = policy(SAC(CONFIG))
    trainer = Trainer(subject, SAC(CONFIG), 64)
    assert {name.split(".")[0] for name in trainer.parameters} == {
        "backbone",
        "actor",
        "value_head",
        "log_alpha",
    }
    before = snapshot(trainer)
    target = [p.clone() for p in trainer.target.parameters()]
    sac_step(trainer, transitions(), torch.Generator().manual_seed(0), with_actor=False)
    changed = {
        name.split(".")[0]
        for name, value in snapshot(trainer).items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"value_head"}, "the linear policy's features have no weights"
    for slow, old, name in zip(
        trainer.target.parameters(),
        target,
        [n for n in before if n.startswith("value_head")],
        strict=True,
    ):
        torch.testing.assert_close(
            slow, old + CONFIG.target_rate * (trainer.parameters[name].detach() - old)
        )
    metrics = sac_step(trainer, transitions(), torch.Generator().manual_seed(0), with_actor=True)
    changed = {
        name.split(".")[0]
        for name, value in snapshot(trainer).items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"value_head", "actor", "log_alpha"} and metrics[
        "actor/alpha"
    ] == pytest.approx(0.1)
    assert all(parameter.requires_grad for parameter in subject.critics.parameters())


def test_the_actor_waits_until_its_warm_up_is_over() -> None:
    config = replace(CONFIG, actor_warmup=2)
    trainer = Trainer(policy(SAC(config)), SAC(config), 64)
    before = snapshot(trainer)

    def changed(iteration: int) -> set[str]:
        sac_step(
            trainer, transitions(), torch.Generator().manual_seed(0), True, iteration=iteration
        )
        return {
            name.split(".")[0]
            for name, value in snapshot(trainer).items()
            if not torch.equal(value, before[name])
        }

    assert changed(1) == {"value_head"} and changed(2) == {"value_head", "actor", "log_alpha"}


def test_a_vlas_adapters_learn_only_from_the_critics() -> None:
    vla = tiny()
    add_lora(vla, LoraOptions(rank=2), 0)
    subject = SAC(CONFIG).wrap(vla, 0)
    trainer = Trainer(subject, SAC(CONFIG), 64)
    shown = subject.prepare(observations(subject, 4))
    fields = transitions(size=4).now
    batch = Transitions(
        *(
            {name: fields[name] for name in ("reward", "discount", "acted")} | shown
            for _ in range(2)
        )
    )
    batch.now["action"] = torch.rand(4, *subject.size)
    adapters = [name for name in trainer.parameters if "lora_" in name]
    assert adapters and {name.split(".")[0] for name in trainer.parameters} == {
        "backbone",
        "actor",
        "value_head",
        "log_alpha",
    }
    before = snapshot(trainer)
    sac_step(trainer, batch, torch.Generator().manual_seed(0), with_actor=False)
    learnt = [
        name
        for name in adapters
        if "lora_B" in name and not torch.equal(trainer.parameters[name].detach(), before[name])
    ]
    assert any("vision" in name for name in learnt) and any("language" in name for name in learnt)
    trainer.optimizers["critic"].zero_grad(set_to_none=True)
    trainer.optimizers["critic"].step = lambda: None  # type: ignore[method-assign, assignment]
    kept = {name: trainer.parameters[name].detach().clone() for name in adapters}
    sac_step(trainer, batch, torch.Generator().manual_seed(0), with_actor=True)
    assert all(torch.equal(trainer.parameters[name].detach(), kept[name]) for name in adapters)


def test_the_actor_maximises_the_critics() -> None:
    """With critics that prefer one action, the actor converges to it, and alpha reaches the target entropy."""
    config = replace(CONFIG, learning_rate=1e-2, value_learning_rate=0.0, initial_alpha=0.01)
    subject = policy(SAC(config))
    trainer = Trainer(subject, SAC(config), 64)

    class Likes(nn.Module):
        def forward(self, features: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
            return (
                -((action - 0.5) ** 2)
                .sum(dim=(1, 2))
                .expand(4 if chosen is None else len(chosen), -1)
            )

    batch = transitions(size=32)
    features = subject.encode(batch.now).pooled.detach()
    subject.critics.forward = Likes().forward  # type: ignore[method-assign]
    trainer.target.critics.forward = Likes().forward  # type: ignore[method-assign]
    subject.critics.layers[0].weight.requires_grad_(True)
    for i in range(150):
        draws = torch.randn(32, 1, 4, generator=torch.Generator().manual_seed(i))
        drawn, log_prob = subject.draw(features, draws)
        trainer.descend(
            "actor",
            actor_loss(subject.critics(features, drawn), log_prob, torch.tensor(0.01), "mean"),
        )
    assert (subject.distribution(features)[0].tanh() - 0.5).abs().mean() < 0.1


def test_an_iteration_collects_stores_and_learns(tmp_path: Path) -> None:
    _, (metrics,), _ = run(tmp_path, SAC(CONFIG), 1)
    assert metrics["rollout/episodes"] == 4 and metrics["actor/updates"] == round(
        metrics["rollout/steps"] * 0.3
    )
    assert metrics["replay/size"] == metrics["rollout/steps"]
    assert {
        "critic/vf_loss",
        "actor/entropy",
        "actor/alpha",
        "timing_s/update",
        "timing_s/rollout",
    } <= metrics.keys()


@pytest.mark.parametrize("unit", GAMMA_UNITS)
def test_replay_rewards_are_discounted_per_step_or_per_chunk(tmp_path: Path, unit: str) -> None:
    config = replace(CONFIG, gamma=0.5, gamma_unit=unit)
    subject = SAC(config).wrap(LinearPolicy(LinearOptions(chunk=4)), 0)
    running = flow(tmp_path, subject, Trainer(subject, SAC(config), 64), SAC(config), {})
    running.begin(0)
    running.collect_transitions(running.training_episodes(16, 0))
    now = replays_of(running)[0].sample(64, torch.Generator().manual_seed(0)).now
    # episodes of up to 6 steps in chunks of 4: full chunks and shorter last ones; 0 where the episode terminated
    allowed = {0.0, 0.5} if unit == "chunk" else {0.0, 0.5, 0.25, 0.125, 0.0625}
    discounts = set(now["discount"].tolist())
    assert discounts <= allowed and 0.0 in discounts and (unit == "chunk" or 0.0625 in discounts)


@pytest.mark.parametrize(("demonstrations", "sft_coef"), [(0, 0.0), (3, 0.0), (3, 0.5)])
def test_resume_from_a_checkpoint_is_deterministic(
    tmp_path: Path, demonstrations: int, sft_coef: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_vla.training.replay.SEGMENT", 16)
    config = replace(CONFIG, demonstrations=demonstrations, sft_coef=sft_coef, replay_capacity=60)
    straight, _, _ = run(tmp_path / "straight", SAC(config), 4)
    stopped, _, _ = run(tmp_path / "stopped", SAC(config), 4, stop=2)
    for name, value in straight.policy.state_dict().items():
        assert torch.equal(value, stopped.policy.state_dict()[name]), name


def test_training_improves_success(tmp_path: Path) -> None:
    config = replace(
        CONFIG,
        episodes=8,
        updates_per_step=1.0,
        gamma=0.9,
        learning_rate=3e-3,
        value_learning_rate=3e-3,
    )
    _, metrics, _ = run(tmp_path, SAC(config), 12)
    early, late = (
        [m["rollout/success_once"] for m in part] for part in (metrics[:3], metrics[-3:])
    )
    assert sum(late) / 3 > sum(early) / 3 + 0.25


def test_co_training_moves_the_actor_towards_demonstrations() -> None:
    config = replace(CONFIG, sft_coef=100.0, demonstrations=1, learning_rate=1e-2)
    subject = policy(SAC(config))
    trainer = Trainer(subject, SAC(config), 64)
    shown = transitions(seed=5)
    losses = [
        sac_step(trainer, transitions(), torch.Generator().manual_seed(i), True, shown)["sft/loss"]
        for i in range(60)
    ]
    with torch.no_grad():
        features = subject.encode(shown.now).pooled
        expected = ((subject.distribution(features)[0].tanh() - shown.now["action"]) ** 2).mean()
    assert losses[-1] < 0.2 * losses[0] and float(expected) < 0.2 * losses[0]


class Flow(LinearPolicy):
    """The noise determines the actions: only a large fourth number raises the level."""

    noise_dim = 4

    def act_from_noise(self, features: Any, noise: Tensor) -> Tensor:
        return (noise[:, None, [3, 1, 2, 0]] - 0.5).clamp(-1, 1).expand(-1, self.spec.chunk, -1)


def successes(running: OffPolicyFlow, config: SACConfig, iterations: int) -> list[float]:
    """Run the iterations; return the success of each one's episodes."""
    found = []
    for iteration in range(iterations):
        running.begin(iteration)
        SAC(config, 1.0).iteration(running)
        found.append(running.metrics["rollout/success_once"])
    return found


LEARNT = {"actor", "value_head", "log_alpha"}
STEERED = replace(
    CONFIG,
    noise_bound=1.6,
    frozen_backbone=True,
    episodes=8,
    updates_per_step=1.0,
    learning_rate=3e-3,
    gamma=0.9,
)


def test_a_frozen_flow_is_steered_by_its_noise(tmp_path: Path) -> None:
    base = Flow(LinearOptions(chunk=2))
    subject = SAC(STEERED).wrap(base, 0)
    assert {
        name.split(".")[0] for name, p in subject.named_parameters() if p.requires_grad
    } == LEARNT | {"feature_mean", "feature_spread"}
    trainer = Trainer(subject, SAC(STEERED), 64)
    assert SAC(STEERED).target_entropy(subject) == -4
    running = flow(tmp_path, subject, trainer, SAC(STEERED), {})
    success = successes(running, STEERED, 10)
    assert sum(success[-3:]) / 3 > sum(success[:3]) / 3 + 0.25
    stored = replays_of(running)[0].sample(16, torch.Generator().manual_seed(0)).now
    assert (
        stored["action"].shape == (16, 4)
        and stored["action"].abs().max() <= 1
        and "image" not in stored
    )


@torch.no_grad()
def test_steered_log_probabilities_are_those_of_the_noise(tmp_path: Path) -> None:
    subject = SAC(STEERED).wrap(Flow(LinearOptions(chunk=2)), 0)
    inputs = subject.prepare(observations(subject, 5))
    sample = subject.act(subject.encode(inputs), noise(torch.arange(5)), 1.0)
    mean, log_std = subject.distribution(subject.encode(inputs).pooled)
    torch.testing.assert_close(
        sample.log_prob.sum((1, 2)), squash(sample.latent["pre"], mean, log_std)[1].sum(1)
    )
    torch.testing.assert_close(
        subject.evaluate(inputs, sample.latent, 1.0).log_prob, sample.log_prob
    )
    assert torch.equal(
        sample.actions, subject.base.act_from_noise(None, 1.6 * sample.latent["chosen"])
    )


REFINED = replace(
    CONFIG,
    anchor=0.0,
    frozen_backbone=True,
    episodes=8,
    updates_per_step=1.0,
    learning_rate=3e-3,
    gamma=0.9,
)


def refining(anchor: float, chunk: int = 2) -> SACPolicy:
    return SAC(replace(REFINED, anchor=anchor)).wrap(LinearPolicy(LinearOptions(chunk=chunk)), 0)


@torch.no_grad()
def test_a_refining_actor_starts_as_the_frozen_policy() -> None:
    subject = refining(0.1)
    inputs = subject.prepare(observations(subject, 5))
    own = subject.base.act(subject.base.encode(inputs), None, 0.0).actions
    features = subject.encode(inputs)
    assert torch.equal(subject.own_actions(features.pooled), own)
    assert torch.equal(
        features.pooled[:, : -own[0].numel()], subject.base.pooled(subject.base.encode(inputs))
    )
    torch.testing.assert_close(subject.act(features, None, 0.0).actions, own.clamp(-0.98, 0.98))
    assert {
        name.split(".")[0] for name, p in subject.named_parameters() if p.requires_grad
    } == LEARNT | {"feature_mean", "feature_spread"}


def test_the_anchor_is_the_squared_distance_to_the_frozen_policys_actions() -> None:
    """The gradient of a step with it is that of one without it, and its own."""
    gradients = []
    distance = 0.0
    for anchor in (0.0, 0.7):
        subject = refining(anchor)
        trainer = Trainer(subject, SAC(replace(REFINED, anchor=anchor, max_grad_norm=1e6)), 64)
        kept: list[Tensor] = []
        bias: Any = subject.actor[-2].bias
        bias.register_hook(kept.append)
        inputs = subject.precompute(subject.prepare(observations(subject, 6)))
        distance = sac_step(
            trainer, stored(subject, inputs), torch.Generator().manual_seed(1), True
        )["actor/distance"]
        gradients.append(kept[-1])
    subject = refining(0.7)
    inputs = subject.precompute(subject.prepare(observations(subject, 6)))
    generator = torch.Generator().manual_seed(1)
    size = (6, *subject.size)
    torch.randperm(REFINED.critics, generator=generator)
    torch.randn(size, generator=generator)  # of the critics' targets
    drawn = torch.randn(size, generator=generator)
    own = subject.own_actions(inputs["features"])
    chosen, _ = subject.draw(inputs["features"], drawn)
    expected = (chosen - own).pow(2).mean()
    assert distance == pytest.approx(expected.item(), rel=1e-5)
    (slope,) = torch.autograd.grad(0.7 * expected, subject.actor[-2].bias)
    torch.testing.assert_close(gradients[1] - gradients[0], slope, atol=1e-6, rtol=1e-3)


def test_features_of_a_frozen_backbone_are_standardised_once() -> None:
    """By the first update's batch: after it, its features have mean 0 and deviation 1."""
    subject = refining(0.1)
    trainer = Trainer(subject, SAC(replace(REFINED, anchor=0.1)), 64)
    raw = subject.precompute(subject.prepare(observations(subject, 64)))["features"]
    assert torch.equal(subject.standard(raw), raw)
    sac_step(trainer, stored(subject, {"features": raw}), torch.Generator(), True)
    found = subject.standard(raw)
    varies = raw.std(0) > 0.02 * raw.std(0).max()
    assert varies.sum() > 3
    torch.testing.assert_close(found.mean(0), torch.zeros_like(found[0]), atol=1e-3, rtol=0.0)
    torch.testing.assert_close(
        found.std(0, correction=0)[varies], torch.ones(int(varies.sum())), atol=1e-3, rtol=0.0
    )
    mean, spread = subject.feature_mean, subject.feature_spread
    assert mean is not None and spread is not None and not torch.equal(mean, torch.zeros_like(mean))
    before = mean.detach().clone(), spread.detach().clone()
    sac_step(trainer, stored(subject, {"features": raw + 1}), torch.Generator(), True)
    assert torch.equal(mean, before[0]) and torch.equal(spread, before[1])
    assert subject.standard(raw + 1e6).abs().max() == 10


def test_critics_and_targets_are_of_standard_features() -> None:
    subject = refining(0.1)
    trainer = Trainer(subject, SAC(replace(REFINED, anchor=0.1)), 64)
    raw = subject.precompute(subject.prepare(observations(subject, 8)))["features"]
    batch = stored(subject, {"features": raw})
    sac_step(trainer, batch, torch.Generator(), True)
    with torch.no_grad():
        values = subject.critics(subject.standard(raw), batch.now["action"]).mean()
        generator = torch.Generator().manual_seed(3)
        chosen = torch.randperm(REFINED.critics, generator=generator)[: REFINED.critic_subset]
        action, _ = subject.draw(raw, torch.randn((8, *subject.size), generator=generator))
        following = (
            trainer.target["critics"](subject.standard(raw), action, chosen).min(dim=0).values
        )
    found = sac_step(trainer, batch, torch.Generator().manual_seed(3))
    assert found["critic/value_mean"] == pytest.approx(float(values), rel=1e-5)
    assert found["critic/target_mean"] == pytest.approx(
        float((1 + 0.9 * following).mean()), rel=1e-5
    )


def test_features_of_a_trained_backbone_are_as_they_are() -> None:
    subject = SAC(CONFIG).wrap(LinearPolicy(LinearOptions()), 0)
    raw = subject.pooled(subject.encode(subject.prepare(observations(subject, 8))))
    assert subject.standard(raw) is raw and subject.feature_mean is None


def stored(subject: SACPolicy, inputs: dict[str, Tensor]) -> Transitions:
    count = len(inputs["features"])
    acted = {
        "action": normal(count, *subject.size).float().clamp(-1, 1),
        "reward": torch.ones(count),
        "discount": torch.full((count,), 0.9),
    }
    return Transitions({**inputs, **acted}, inputs)


def test_refining_a_frozen_policy_improves_it(tmp_path: Path) -> None:
    subject = refining(0.0)
    trainer = Trainer(subject, SAC(REFINED), 64)
    running = flow(tmp_path, subject, trainer, SAC(REFINED), {})
    success = successes(running, REFINED, 12)
    assert sum(success[-3:]) / 3 > sum(success[:3]) / 3 + 0.25
    stored = replays_of(running)[0].sample(16, torch.Generator().manual_seed(0)).now
    assert "image" not in stored and stored["features"].shape[1] == subject.features


def test_a_policy_without_noise_cannot_be_steered() -> None:
    with pytest.raises(UserError, match="model=linear has no initial noise: use a flow policy"):
        policy(SAC(STEERED))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sft_coef": 0.1},
            "algorithm.sft_coef=0.1 needs demonstrations: set algorithm.demonstrations or",
        ),
        (
            {"noise_bound": 1.0},
            "algorithm.noise_bound needs a frozen policy: set algorithm.frozen_backbone=true",
        ),
        (
            {"noise_bound": 1.0, "frozen_backbone": True, "demonstrations": 2},
            "algorithm.noise_bound cannot use demonstrations",
        ),
        (
            {"anchor": 0.1},
            "algorithm.anchor refines the actions of a frozen policy: set algorithm.frozen_backbone=true",
        ),
        ({"anchor": 0.1, "frozen_backbone": True, "noise_bound": 1.0}, "set only one of them"),
        ({"critic_subset": 5}, "algorithm.critic_subset=5 is more than algorithm.critics=4"),
        (
            {"demonstration_share": 0.0, "demonstrations": 3},
            "algorithm.demonstration_share=0 disables",
        ),
        (
            {"demonstrations": 3, "dataset": "somewhere"},
            "algorithm.dataset and algorithm.demonstrations exclude",
        ),
        (
            {"demonstration_share": 0.0, "dataset": "somewhere"},
            "algorithm.demonstration_share=0 disables",
        ),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SAC(replace(CONFIG, **changes), 1.0)
