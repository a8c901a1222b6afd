"""Float32 masters of bfloat16 weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.core.devices import CPU
from rlinf_vla.training.trainer import ExtraLoss, Trainer
from tests.training.processes import on_ranks
from tests.training.test_data_parallel import make
from tests.training.test_trainer import Rows, assert_equal

RATE = 5e-6
SETTINGS = OptimizerConfig(RATE, RATE, 1e9)


class Weights(nn.Module):
    """The output is linear in every weight, so the gradient does not depend on the rounding of the weights."""

    def __init__(self, dtype: torch.dtype, frozen: bool = False) -> None:
        super().__init__()
        start = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.body = nn.Linear(16, 3, bias=False)
        self.body.weight = nn.Parameter(start.to(dtype))
        self.value_head = nn.Linear(3, 1)  # float32 in every case
        nn.init.ones_(self.value_head.weight)

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x.to(self.body.weight.dtype)).float()
        return (hidden * y[:, None]).sum() + self.value_head(hidden.detach()).sum()


def linear(model: Any, part: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    return model.evaluate(part.x, part.y), {}


def batch(seed: int, size: int = 8) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 16, generator=generator).abs().bfloat16().float()
    y = torch.randint(0, 3, (size,), generator=generator).float()
    return Rows(x, y, torch.ones(size, dtype=torch.bool))


def trainer(
    dtype: torch.dtype,
    micro: int = 8,
    settings: OptimizerConfig = SETTINGS,
    model: nn.Module | None = None,
) -> Trainer:
    return Trainer(model or Weights(dtype), settings, micro)  # type: ignore[arg-type]


def train(subject: Trainer, steps: range) -> None:
    for seed in steps:
        subject.step(batch(seed), linear)


def body(of: Trainer) -> Tensor:
    return of.policy.body.weight.detach()  # type: ignore[union-attr, operator]


def test_400_steps_are_those_of_a_float32_run_rounded() -> None:
    """At a learning rate of which no single step changes a bfloat16 weight near 1.

    Products of a row are exact in bfloat16, so the gradients of both runs are the same.
    """
    low, full = trainer(torch.bfloat16, micro=1), trainer(torch.float32, micro=1)
    first = body(low).clone()
    train(low, range(1))
    assert ((body(low) != first) & (first.abs() > 0.1)).sum() == 0
    train(low, range(1, 400))
    train(full, range(400))
    assert body(low).dtype == torch.bfloat16
    assert torch.equal(body(low), body(full).bfloat16())
    assert torch.equal(low.trained["body.weight"], body(full))
    assert (body(low) != first).float().mean() > 0.2


def test_weights_that_are_precise_enough_have_no_masters() -> None:
    for dtype in (torch.float32, torch.float64):
        subject = trainer(dtype)
        assert all(
            subject.trained[name] is parameter for name, parameter in subject.parameters.items()
        )
        train(subject, range(1))
        assert not any(name.endswith(".master") for name in subject.state())
    low = trainer(torch.bfloat16)
    assert low.trained["value_head.bias"] is low.parameters["value_head.bias"]


def test_moments_and_gradients_are_float32() -> None:
    subject = trainer(torch.bfloat16)
    train(subject, range(2))
    assert {value.dtype for value in subject.state().values()} == {torch.float32}
    assert subject.parameters["body.weight"].grad is None  # freed when added
    gradient = subject.trained["body.weight"].grad
    assert gradient is not None and gradient.dtype == torch.float32


def test_micro_batches_lose_no_small_terms() -> None:
    """256 + 1 is 256 in bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        subject = trainer(dtype, micro=1)
        y = torch.tensor([256.0, *[1.0] * 15])

        def constant(model: Any, part: Rows) -> tuple[Tensor, dict[str, Tensor]]:
            return model.body.weight.sum() * part.y.sum(), {}

        subject.step(Rows(torch.zeros(16, 3), y, torch.ones(16, dtype=torch.bool)), constant)
        found.append(subject.trained["body.weight"].grad)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], torch.full((3, 16), 271 / 16))


def test_an_additional_term_is_added() -> None:
    subject, other = trainer(torch.bfloat16), trainer(torch.float32)
    for each in (subject, other):
        each.step(batch(0), linear, beside=[ExtraLoss(batch(1), linear, 0.5)])
    torch.testing.assert_close(
        subject.trained["body.weight"].grad, other.trained["body.weight"].grad, rtol=0.01, atol=1e-3
    )


def test_the_gradient_is_of_one_step_only() -> None:
    subject, again = trainer(torch.bfloat16), trainer(torch.bfloat16)
    train(subject, range(2))
    again.step(batch(1), linear)
    assert torch.equal(subject.trained["body.weight"].grad, again.trained["body.weight"].grad)  # type: ignore[arg-type]


def test_while_only_the_critic_trains_masters_stay() -> None:
    subject = trainer(torch.bfloat16)
    before = {name: value.clone() for name, value in subject.trained.items()}
    subject.update(batch(0), linear, [torch.arange(8)], critic_only=True)
    changed = {
        name for name, value in subject.trained.items() if not torch.equal(value, before[name])
    }
    assert changed == {"value_head.weight", "value_head.bias"}
    train(subject, range(1))
    assert not torch.equal(subject.trained["body.weight"], before["body.weight"])


def test_a_second_trainer_of_a_policy_gets_its_gradients() -> None:
    model = Weights(torch.bfloat16)
    first = trainer(torch.bfloat16, model=model)
    second = trainer(torch.bfloat16, model=model)
    train(first, range(1))
    train(second, range(1))
    assert torch.equal(first.trained["body.weight"].grad, second.trained["body.weight"].grad)  # type: ignore[arg-type]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    subject = trainer(torch.bfloat16)
    train(subject, range(3))
    before = {name: value.clone() for name, value in subject.trained.items()}
    with pytest.raises(FloatingPointError):
        subject.step(batch(0), lambda model, part: (model.body.weight.sum() * float("inf"), {}))
    assert_equal(before, subject.trained)


def test_a_descent_steps_on_the_masters() -> None:
    subject, full = trainer(torch.bfloat16), trainer(torch.float32)
    for each in (subject, full):
        for seed in range(40):
            each.descend("policy", linear(each.policy, batch(seed))[0])
    assert torch.equal(body(subject), body(full).bfloat16())


def test_resume_is_bit_identical() -> None:
    whole, begun, continued = (trainer(torch.bfloat16) for _ in range(3))
    train(whole, range(40))
    train(begun, range(20))
    state = {name: value.clone() for name, value in begun.state().items()}
    assert not torch.equal(state["body.weight.master"], body(begun).float())
    continued.policy.load_state_dict(begun.policy.state_dict())
    continued.load_state(state)
    train(continued, range(20, 40))
    assert_equal(continued.state(), whole.state())
    assert torch.equal(body(continued), body(whole))
    assert_equal(state, begun.state())  # a copy was loaded


def test_a_checkpoint_without_masters_continues_from_its_weights() -> None:
    """Of a run before there were masters; its moments are bfloat16."""
    begun, continued = trainer(torch.bfloat16), trainer(torch.bfloat16)
    train(begun, range(3))
    old = {
        name: value.bfloat16()
        for name, value in begun.state().items()
        if not name.endswith(".master")
    }
    continued.policy.load_state_dict(
        {name: value * 2 for name, value in begun.policy.state_dict().items()}
    )
    continued.load_state(old)
    assert torch.equal(continued.trained["body.weight"], body(continued).float())
    train(continued, range(3, 5))
    assert continued.state()["body.weight.exp_avg"].dtype == torch.float32


def test_other_weights_come_and_go() -> None:
    subject, plain = trainer(torch.bfloat16), trainer(torch.bfloat16)
    for each in (subject, plain):
        train(each, range(10))
    with subject.swapped_weights(
        {name: torch.zeros_like(value) for name, value in subject.copies().items()}
    ):
        assert not body(subject).any()
    for each in (subject, plain):
        train(each, range(10, 20))
    assert_equal(subject.state(), plain.state())
    assert torch.equal(body(subject), body(plain))


def test_masters_move_with_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, stayed = trainer(torch.bfloat16), trainer(torch.bfloat16)
    for each in (subject, stayed):
        train(each, range(3))
    moved: list[Tensor] = []
    copied = Tensor.to
    monkeypatch.setattr(
        Tensor,
        "to",
        lambda value, *where, **how: (moved.append(value), copied(value, *where, **how))[1],
    )
    masters = {
        name: value.data_ptr()
        for name, value in subject.state().items()
        if name.endswith(".master")
    }
    subject.move(CPU)
    monkeypatch.undo()
    assert set(masters.values()) < {value.data_ptr() for value in moved}
    assert subject.trained["body.weight"].grad is None  # would keep its memory on the GPU
    for each in (subject, stayed):
        train(each, range(3, 5))
    assert_equal(subject.state(), stayed.state())


def on_two(mode: str, tmp_path: Path) -> list[dict[str, Tensor]]:
    def work(rank: int) -> dict[str, Tensor]:
        subject = make(mode, 2, Weights(torch.bfloat16), SETTINGS)
        train(subject, range(20))
        state = subject.state()
        weights = subject.weights()
        again = make(mode, 2, copy.deepcopy(Weights(torch.bfloat16)), SETTINGS)
        whole = [state]
        torch.distributed.broadcast_object_list(whole, 0)
        again.load_state(whole[0])
        loaded = {f"again {name}": value for name, value in again.state().items()}
        return (
            state
            | {f"weights {name}": value.detach().clone() for name, value in weights.items()}
            | loaded
        )

    return on_ranks(work, tmp_path)


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_ranks_have_the_masters_of_one_process(tmp_path: Path, mode: str) -> None:
    found = on_two(mode, tmp_path)[0]
    master = found["body.weight.master"]
    assert master.dtype == torch.float32 and master.shape == (3, 16)
    assert torch.equal(found["weights body.weight"], master.bfloat16())
    assert torch.equal(found["again body.weight.master"], master)
    alone = trainer(torch.bfloat16, micro=2)
    train(alone, range(20))
    torch.testing.assert_close(master, alone.state()["body.weight.master"], rtol=0, atol=RATE)
