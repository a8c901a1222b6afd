"""Training of a model of values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlinf_vla.algorithms.advantage_labels import BINS, centres
from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.algorithms.sft import Draws
from rlinf_vla.algorithms.value import Returns, ValueConfig, ValuePolicy, ValueTraining
from rlinf_vla.config.errors import UserError
from rlinf_vla.testing.policy_calls import observations
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy

CONFIG = ValueConfig(
    demonstrations=DemonstrationConfig(dataset="data"), batch_size=40, held_out=0.25
)
NONE = Draws(lambda draws: None, lambda draws: None)  # type: ignore[arg-type, return-value]


def valued(config: ValueConfig = CONFIG, seed: int = 0) -> ValuePolicy:
    policy = ValueTraining(config).wrap(LinearPolicy(LinearOptions()), seed)
    assert isinstance(policy, ValuePolicy)
    return policy


def test_the_loss_is_cross_entropy_with_the_bins_beside_the_return() -> None:
    policy = valued()
    inputs = policy.prepare(observations(policy, 3))
    returns = torch.tensor([0.0, -1.0, -0.5025])
    batch = Returns(inputs, returns, torch.zeros(3))
    with torch.no_grad():
        loss, statistics = ValueTraining(CONFIG).loss(policy, batch, NONE)
        logits = policy.logits(inputs)
        values = policy.value(policy.encode(inputs))
    log_prob = logits.log_softmax(1)
    middle = -(log_prob[2, 99] + log_prob[2, 100]) / 2
    expected = -log_prob[0, BINS - 1] - log_prob[1, 0] + middle
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, log_prob.exp() @ centres())
    torch.testing.assert_close(statistics["value/error"], (values - returns).abs().sum())
    assert float(loss) > math.log(2)


def test_fresh_heads_depend_on_the_seed_alone_and_leave_the_other_heads() -> None:
    one, same, other = valued(), valued(), valued(seed=1)
    name = "value_head.0.weight"
    assert torch.equal(one.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    trained = {name for name, value in one.named_parameters() if value.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"backbone", "value_head"}
    frozen = valued(replace(CONFIG, frozen_backbone=True))
    trained = {name for name, value in frozen.named_parameters() if value.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"value_head"}


class Flow:
    iteration = 3

    def __init__(self, frames: Returns) -> None:
        self.frames = frames
        self.batches: list[Returns] = []

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(1)

    def returns(
        self, config: DemonstrationConfig, failure: float
    ) -> tuple[Returns, dict[str, int]]:
        assert failure == CONFIG.failure
        return self.frames, {"push": 7}

    def fit(self, batch: Returns, rate: float) -> None:
        assert rate == pytest.approx(4 / 20)
        self.batches.append(batch)

    def log(self, metrics: dict[str, float]) -> None: ...


def frames(weight: torch.Tensor | None = None) -> Returns:
    numbers = torch.arange(80)
    return Returns({"x": numbers}, -numbers / 80, numbers // 10, weight)


def test_an_iteration_learns_from_episodes_that_are_not_held_out() -> None:
    algorithm = ValueTraining(CONFIG, iterations=100)
    flow = Flow(frames())
    algorithm.iteration(flow)
    (batch,) = flow.batches
    assert len(batch) == 40 and set(batch.episode.tolist()) == {0, 1, 2, 4, 5, 6}
    assert torch.equal(batch.returns, -batch.inputs["x"] / 80)
    held_out = frames()[algorithm.is_held_out(frames())]
    assert set(held_out.episode.tolist()) == {3, 7}


def test_one_of_few_episodes_is_held_out() -> None:
    algorithm = ValueTraining(replace(CONFIG, held_out=0.1), iterations=100)
    few = frames()[:20]
    assert set(few[algorithm.is_held_out(few)].episode.tolist()) == {1}
    with pytest.raises(UserError, match="needs two episodes"):
        algorithm.is_held_out(frames()[:10])


def test_rows_are_drawn_by_weight() -> None:
    flow = Flow(frames(torch.where(torch.arange(80) // 10 == 5, 1.0, 0.0).double()))
    ValueTraining(CONFIG, iterations=100).iteration(flow)
    assert set(flow.batches[0].episode.tolist()) == {5}


def test_a_checkpoint_knows_the_longest_episodes() -> None:
    algorithm, again = (ValueTraining(CONFIG, iterations=100) for _ in range(2))
    algorithm.iteration(Flow(frames()))
    again.restore(algorithm.state())
    assert again.longest == {"push": 7}
    again.restore({})
    assert again.longest == {}


def test_it_needs_a_dataset() -> None:
    with pytest.raises(UserError, match=r"set algorithm\.demonstrations\.dataset=DIR"):
        ValueTraining(ValueConfig())
