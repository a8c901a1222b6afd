"""The moving average of the trained weights, which acts while steps are taken on the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.devices import CPU
from rlinf_vla.core.protocols import Policy
from rlinf_vla.testing.policy_calls import observations
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import add_lora
from rlinf_vla.training.trainer import AVERAGE, Trainer
from tests.models.tiny_openvla import smaller_directory, tiny
from tests.training.processes import on_ranks
from tests.training.test_checkpoint import assert_same, learn
from tests.training.test_data_parallel import make
from tests.training.test_masters import Weights, batch, linear, train

DECAY = 0.9
RATE = 1e-3
SETTINGS = OptimizerConfig(RATE, RATE, 1e9, ema_decay=DECAY)


def model_of(dtype: torch.dtype) -> Weights:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Weights(dtype)


def trainer(dtype: torch.dtype, settings: OptimizerConfig = SETTINGS) -> Trainer:
    return Trainer(model_of(dtype), settings, 8)


def weights(of: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in of.policy.named_parameters()}


def acting(of: Trainer) -> dict[str, Tensor]:
    with of.averaged_weights():
        return weights(of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_average_of_a_loop_in_float64(dtype: torch.dtype) -> None:
    """As openpi's trainer: it begins with the initial weights, and no bias is corrected."""
    subject = trainer(dtype)
    expected = {name: value.double() for name, value in weights(subject).items()}
    for seed in range(30):
        subject.step(batch(seed), linear)
        for name, value in subject.trained.items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * value.detach().double()
    found = subject.state()
    for name, value in expected.items():
        average = found[f"{name}.{AVERAGE}"]
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), value, rtol=3e-7, atol=1e-7)
        acts = acting(subject)[name]
        assert (
            torch.equal(acts, average.to(acts.dtype)) and acts.dtype == weights(subject)[name].dtype
        )
        assert torch.equal(subject.weights()[name], acts), "what is published"
        assert not torch.equal(acts, weights(subject)[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_does_not_see_it(dtype: torch.dtype) -> None:
    subject, plain = trainer(dtype), trainer(dtype, replace(SETTINGS, ema_decay=None))
    for seed in range(10):
        metrics = [each.step(batch(seed), linear) for each in (subject, plain)]
        assert metrics[0] == metrics[1]
        acting(subject)
        assert_same(weights(subject), weights(plain))
    assert_same(acting(plain), weights(plain))
    assert plain.state().keys() < subject.state().keys()


def test_it_moves_with_the_state() -> None:
    subject, stayed = trainer(torch.bfloat16), trainer(torch.bfloat16)
    for each in (subject, stayed):
        train(each, range(3))
    subject.move(CPU)
    for each in (subject, stayed):
        train(each, range(3, 5))
    assert_same(subject.state(), stayed.state())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smaller_directory(tmp_path_factory.mktemp("model"))


def build(model: Path, rank: int, dtype: str, decay: float | None) -> tuple[Policy, Trainer]:
    policy = tiny(directory=model, dtype=dtype)
    add_lora(policy, LoraOptions(rank=rank), 0)
    return policy, Trainer(policy, OptimizerConfig(1e-2, 1e-2, 1.0, ema_decay=decay), 3)


@pytest.mark.parametrize("rank, dtype", [(4, "float32"), (0, "float32"), (0, "bfloat16")])
def test_a_checkpoint_has_the_average_and_resumes_with_the_same_bits(
    model: Path, tmp_path: Path, rank: int, dtype: str
) -> None:
    policy, subject = build(model, rank, dtype, DECAY)
    learn(policy, subject, range(2))
    written = save_checkpoint(tmp_path, policy, subject, {"iteration": 2}, 9)
    state = subject.state()
    trained = subject.parameters.keys()
    assert {f"{name}.{AVERAGE}" for name in trained} <= state.keys(), "adapters and heads alone"
    assert sum(key.endswith(f".{AVERAGE}") for key in state) == len(trained)
    acts = acting(subject)

    reader, _ = build(model, rank, dtype, None)
    load_checkpoint(written, reader)
    assert_same({name: value.detach() for name, value in reader.named_parameters()}, acts)
    inputs = policy.prepare(observations(policy, 4))
    actions = [each.act(each.encode(inputs), None, 0.0).actions for each in (policy, reader)]
    assert not torch.equal(*actions)
    with subject.averaged_weights():
        assert torch.equal(policy.act(policy.encode(inputs), None, 0.0).actions, actions[1])

    again, its_trainer = build(model, rank, dtype, DECAY)
    load_checkpoint(written, again, its_trainer)
    assert_same(weights(its_trainer), weights(subject))
    assert_same(its_trainer.state(), state)
    for each, of in ((policy, subject), (again, its_trainer)):
        learn(each, of, range(2, 4))
    assert_same(weights(its_trainer), weights(subject))
    assert_same(its_trainer.state(), subject.state())


def test_a_checkpoint_without_an_average_does_not_resume_with_one(
    model: Path, tmp_path: Path
) -> None:
    policy, subject = build(model, 4, "float32", None)
    learn(policy, subject, range(1))
    written = save_checkpoint(tmp_path, policy, subject, {"iteration": 1}, 9)
    assert not any(AVERAGE in name for name in load_file(written / "optimizer.safetensors"))
    with pytest.raises(Exception, match="optimiser state of another algorithm or version"):
        load_checkpoint(written, *build(model, 4, "float32", DECAY))


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_ranks_have_the_average_of_one_process(tmp_path: Path, mode: str) -> None:
    def work(rank: int) -> dict[str, Any]:
        subject = make(mode, 2, model_of(torch.bfloat16), SETTINGS)
        train(subject, range(10))
        state, published = (
            {name: value.clone() for name, value in found.items()}
            for found in (subject.state(), subject.weights())
        )
        begun = make(mode, 2, model_of(torch.bfloat16), SETTINGS)
        whole = [state]
        torch.distributed.broadcast_object_list(whole, 0)
        begun.load_state(whole[0])
        train(subject, range(10, 12))
        train(begun, range(10, 12))
        return {
            "state": state,
            "published": published,
            "uninterrupted": subject.state() | subject.weights(),
            "resumed": begun.state() | begun.weights(),
        }

    found = on_ranks(work, tmp_path)[0]
    alone = trainer(torch.bfloat16)
    train(alone, range(10))
    expected = alone.state()
    for name in ("body.weight", "value_head.weight"):
        average = found["state"][f"{name}.{AVERAGE}"]
        torch.testing.assert_close(average, expected[f"{name}.{AVERAGE}"], rtol=0, atol=RATE / 2)
        assert torch.equal(found["published"][name], average.to(found["published"][name].dtype))
    assert_same(found["resumed"], found["uninterrupted"])
