from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.training.ranks import minibatches
from rlinf_vla.training.trainer import REFERENCE, ExtraLoss, Trainer

SETTINGS = OptimizerConfig(learning_rate=1e-2, value_learning_rate=5e-2, max_grad_norm=0.7)


class Model(nn.Module):
    """A body and a critic, in float64."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Linear(3, 2, dtype=torch.float64)
            self.value_head = nn.Sequential(
                nn.Linear(2, 4, dtype=torch.float64),
                nn.Tanh(),
                nn.Linear(4, 1, dtype=torch.float64),
            )


@dataclass
class Rows:
    x: Tensor
    y: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Rows:
        return Rows(self.x[index], self.y[index], self.counts[index])

    def to(self, device: torch.device) -> Rows:
        return Rows(self.x.to(device), self.y.to(device), self.counts.to(device))


def rows(size: int = 12, uncounted: float = 0.3, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=generator).double()
    y = torch.randn(size, generator=generator).double()
    return Rows(x, y, torch.rand(size, generator=generator) >= uncounted)


def loss(model: Any, batch: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = model.body(batch.x)
    error = (model.value_head(hidden)[:, 0] - batch.y) ** 2 + hidden.sin().sum(-1)
    total = torch.where(batch.counts, error, 0).sum()
    return total, {"loss": total.detach(), "count": batch.counts.double().sum()}


def test_an_additional_term_adds_its_own_mean() -> None:
    main = rows()
    other = rows(size=5, seed=3)
    found = {}
    for micro in (100, 2):
        subject = trainer(micro)
        subject.step(main, loss, beside=[ExtraLoss(other, loss, 0.3)])
        found[micro] = {name: parameter.grad for name, parameter in subject.parameters.items()}
    expected = Model()
    value = (
        loss(expected, main)[0] / main.counts.sum()
        + 0.3 * loss(expected, other)[0] / other.counts.sum()
    )
    value.backward()
    nn.utils.clip_grad_norm_(expected.parameters(), SETTINGS.max_grad_norm)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[100][name], parameter.grad)
        torch.testing.assert_close(found[2][name], parameter.grad)


def test_reference_weights_are_those_of_the_initial_policy() -> None:
    subject = Trainer(Model(), SETTINGS, 100, keep_reference=True)  # type: ignore[arg-type]
    first = weights(subject)
    subject.step(rows(), loss)
    later = weights(subject)
    with pytest.raises(ZeroDivisionError), subject.kept_weights(REFERENCE):
        assert_equal(weights(subject), first)
        raise ZeroDivisionError
    assert_equal(weights(subject), later)
    assert any(not torch.equal(value, first[name]) for name, value in later.items())


def trainer(
    micro_batch_size: int = 100, settings: OptimizerConfig = SETTINGS, model: Model | None = None
) -> Trainer:
    return Trainer(model or Model(), settings, micro_batch_size)  # type: ignore[arg-type]


def weights(of: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in of.policy.named_parameters()}


def assert_equal(
    first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 0.0
) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=tolerance, msg=name)


def update(of: Trainer, batch: Rows, seed: int = 1, **options: Any) -> dict[str, float]:
    return of.update(
        batch, loss, minibatches(len(batch), options.pop("epochs", 2), 5, seed), **options
    )


@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 1000))
def test_micro_batches_do_not_change_the_result(size: int, micro: int, seed: int) -> None:
    """Masked rows contribute neither to the gradient nor to the mean."""
    batch = rows(size, seed=seed)
    whole = trainer()
    cut = trainer(micro)
    kept = trainer()
    metrics = whole.step(batch, loss)
    assert cut.step(batch, loss) == pytest.approx(metrics, rel=1e-9)
    kept.step(batch[batch.counts], loss)
    assert_equal(weights(cut), weights(whole), 1e-12)
    assert_equal(weights(kept), weights(whole), 1e-12)


def test_a_step_is_adamw_on_the_clipped_mean_gradient() -> None:
    """Computed by hand: two steps, with the bias corrections of Kingma and Ba (2015)."""
    settings = OptimizerConfig(1e-2, 5e-2, max_grad_norm=0.7, weight_decay=0.1)
    subject = trainer(4, settings)
    model = Model()
    mean: dict[str, Tensor] = {}
    square: dict[str, Tensor] = {}
    for t in (1, 2):
        batch = rows(seed=t)
        model.zero_grad()
        (loss(model, batch)[0] / batch.counts.sum()).backward()
        gradient = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        norm = sum(float((g**2).sum()) for g in gradient.values()) ** 0.5
        metrics = subject.step(batch, loss)
        assert metrics["actor/grad_norm"] == pytest.approx(norm) and norm > 0.7
        assert metrics["count"] == 1 and metrics["loss"] == pytest.approx(
            float(loss(model, batch)[1]["loss"]) / int(batch.counts.sum())
        )
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = gradient[name] * 0.7 / norm
                mean[name] = 0.9 * mean.get(name, torch.zeros_like(g)) + 0.1 * g
                square[name] = 0.95 * square.get(name, torch.zeros_like(g)) + 0.05 * g**2
                rate = 5e-2 if name.startswith("value_head.") else 1e-2
                step = mean[name] / (1 - 0.9**t) / ((square[name] / (1 - 0.95**t)).sqrt() + 1e-8)
                p.copy_(p * (1 - rate * 0.1) - rate * step)
        assert_equal(weights(subject), dict(model.named_parameters()), 1e-7)


@pytest.mark.parametrize("still", ["body.", "value_head."])
def test_the_value_head_has_its_own_learning_rate(still: str) -> None:
    rates = (0.0, 1e-2) if still == "body." else (1e-2, 0.0)
    subject = trainer(settings=OptimizerConfig(*rates, max_grad_norm=1.0))
    before = weights(subject)
    subject.step(rows(), loss)
    for name, value in weights(subject).items():
        assert torch.equal(value, before[name]) == name.startswith(still)


def test_the_learning_rate_scale_lasts_one_step() -> None:
    subject, batch = trainer(), rows()
    before = weights(subject)
    subject.step(batch, loss, learning_rate_scale=0.0)
    assert_equal(weights(subject), before)
    half, whole = copy.deepcopy(subject), copy.deepcopy(subject)
    half.step(batch, loss, learning_rate_scale=0.5)
    whole.step(batch, loss)
    for name, value in before.items():
        torch.testing.assert_close(
            weights(whole)[name] - value, 2 * (weights(half)[name] - value), rtol=1e-6, atol=1e-12
        )
    assert [group["lr"] for group in half.optimizers["policy"].param_groups] == [1e-2, 5e-2]


def test_critic_only_changes_nothing_else() -> None:
    subject = trainer()
    before = weights(subject)
    update(subject, rows(), critic_only=True)
    after = weights(subject)
    assert all(
        torch.equal(value, after[name])
        for name, value in before.items()
        if name.startswith("body.")
    )
    assert all(
        not torch.equal(value, after[name])
        for name, value in before.items()
        if name.startswith("value_head.")
    )
    assert {name.split(".")[0] for name in subject.state()} == {"value_head"}, (
        "no Adam state of weights that did not train"
    )
    assert all(parameter.requires_grad for parameter in subject.policy.parameters())
    update(subject, rows())
    assert not torch.equal(weights(subject)["body.weight"], before["body.weight"])


def test_critic_only_ends_with_the_update_that_fails() -> None:
    subject = trainer()
    with pytest.raises(FloatingPointError):
        subject.update(
            rows(),
            lambda model, batch: (loss(model, batch)[0] * float("nan"), {}),
            [torch.arange(5)],
            critic_only=True,
        )
    assert all(parameter.requires_grad for parameter in subject.policy.parameters())


def test_each_epoch_visits_every_row_in_another_order() -> None:
    batch = rows(12)
    seen = []

    def watching(model: Any, part: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(part.y.tolist())
        return loss(model, part)

    trainer(2).update(batch, watching, minibatches(len(batch), 3, 5, seed=7))
    visited = [y for part in seen for y in part]
    epochs = [visited[i : i + 12] for i in (0, 12, 24)]
    assert all(sorted(epoch) == sorted(batch.y.tolist()) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and batch.y.tolist() not in epochs
    assert max(map(len, seen)) == 2


def test_an_update_is_a_function_of_its_seed() -> None:
    results = []
    for seed, micro in ((1, 100), (1, 2), (2, 100)):
        torch.randn(seed)  # for any state of the global generator
        subject = trainer(micro)
        metrics = update(subject, rows(uncounted=0.0), seed)
        results.append(weights(subject))
        assert metrics["actor/updates"] == 6
    assert_equal(results[0], results[1], 1e-12)
    assert not torch.equal(results[0]["body.weight"], results[2]["body.weight"])


def test_an_update_is_its_minibatches_one_by_one() -> None:
    batch, subject, single = rows(), trainer(), trainer()
    metrics = update(subject, batch, seed=3)
    generator = torch.Generator().manual_seed(3)
    parts = []
    for order in [torch.randperm(12, generator=generator) for _ in range(2)]:
        parts += [single.step(batch[order[start : start + 5]], loss) for start in (0, 5, 10)]
    assert_equal(weights(subject), weights(single))
    assert metrics["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 6)


@pytest.mark.parametrize("last", [1, 3, 4])
def test_the_stop_criterion_ends_the_update_after_that_step(last: int) -> None:
    calls: list[dict[str, float]] = []

    def enough(metrics: dict[str, float]) -> bool:
        calls.append(metrics)
        return len(calls) == last

    subject, same = trainer(), trainer()
    progress: list[float] = []
    metrics = update(subject, rows(), enough=enough, progress=progress.append)
    assert len(calls) == metrics["actor/updates"] == last
    update(same, rows(), enough=lambda metrics: same.state()["body.weight.step"] == last)
    assert_equal(weights(subject), weights(same))
    assert progress == pytest.approx([(i + 1) / 6 for i in range(last)])


def test_a_fully_masked_minibatch_is_no_step() -> None:
    subject = trainer()
    before = weights(subject)
    assert subject.step(rows(uncounted=1.1), loss) == {}
    assert update(
        subject, rows(uncounted=1.1), enough=lambda metrics: pytest.fail("asked about nothing")
    ) == {"actor/updates": 0}
    assert_equal(weights(subject), before)
    assert subject.state() == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 11])
def test_a_gradient_that_is_not_finite_takes_no_step(bad: float, where: int) -> None:
    subject = trainer(4)
    update(subject, rows(seed=5))
    before = weights(subject)
    state = subject.state()
    state = {name: value.clone() for name, value in state.items()}
    spoilt = rows(uncounted=0.0)
    spoilt.x[where, 0] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        subject.step(spoilt, loss)
    assert_equal(weights(subject), before)
    assert_equal(subject.state(), state)
    subject.step(rows(), loss)
    assert all(value.isfinite().all() for value in weights(subject).values())


def test_an_infinite_gradient_takes_no_step_either() -> None:
    subject = trainer()
    before = weights(subject)
    with pytest.raises(FloatingPointError, match="not finite"):
        subject.step(rows(), lambda model, batch: (model.body.bias.sum() * float("inf"), {}))
    assert_equal(weights(subject), before)


@pytest.mark.parametrize("first", [{}, {"critic_only": True}])
def test_resume_from_a_state_is_bit_identical(first: dict[str, Any]) -> None:
    """Also if only the critic has been trained so far."""

    def run(subject: Trainer, seeds: range, options: Callable[[int], dict[str, Any]]) -> None:
        for seed in seeds:
            update(subject, rows(seed=seed), seed, **options(seed))

    def options(seed: int) -> dict[str, Any]:
        return first if seed < 2 else {}

    whole, begun, continued = trainer(), trainer(), trainer()
    run(whole, range(4), options)
    run(begun, range(2), options)
    continued.policy.load_state_dict(begun.policy.state_dict())
    continued.load_state({name: value.clone() for name, value in begun.state().items()})
    run(continued, range(2, 4), options)
    assert_equal(weights(continued), weights(whole))
    assert_equal(continued.state(), whole.state())


def test_loaded_state_is_a_copy() -> None:
    begun, other = trainer(), trainer()
    update(begun, rows())
    state = begun.state()
    other.load_state(state)
    kept = {name: value.clone() for name, value in state.items()}
    update(other, rows(seed=9))
    assert_equal(state, kept)


def test_frozen_weights_are_not_trained() -> None:
    model = Model()
    model.body.requires_grad_(False)
    subject = trainer(model=model)
    assert all(name.startswith("value_head.") for name in subject.parameters)
    before = weights(subject)
    update(subject, rows())
    assert torch.equal(weights(subject)["body.weight"], before["body.weight"])
