"""Neither the number of ranks nor sharding changes what is learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.algorithms.on_policy import Batch
from rlinf_vla.algorithms.ppo import PPO, PPOConfig
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.types import Inputs
from rlinf_vla.features.planner import synthetic
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.runtime.workers.trainer import OnPolicyUpdater
from rlinf_vla.testing.policy_calls import with_critic
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from rlinf_vla.training.gradient_checkpointing import checkpoint_blocks
from rlinf_vla.training.lora import add_lora
from rlinf_vla.training.ranks import Division, map_rows, minibatches, rows_of_rank, world_size
from rlinf_vla.training.sharding import shard
from rlinf_vla.training.trainer import REFERENCE, ExtraLoss, Trainer
from tests.models.test_openvla_oft import small as small_oft
from tests.models.test_pi0 import small as small_pi0
from tests.training.processes import on_ranks
from tests.training.test_trainer import SETTINGS, Rows, rows

MODES = ("replicated", "sharded")
UNEVEN = "replicated, in uneven shares"
SIZE = 7


class Toy(nn.Module):
    """Blocks and a critic, in float64, so that rounding hides no error. Two of its weights have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
            self.value_head = nn.Linear(3, 1, dtype=torch.float64)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encode(x)
        return hidden, self.value_head(hidden)[:, 0]


def loss(model: Any, batch: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    hidden, value = model.evaluate(batch.x)
    error = (value - batch.y) ** 2 + hidden.sin().sum(-1)
    total = torch.where(batch.counts, error, 0).sum()
    return total, {"loss": total.detach(), "count": batch.counts.double().sum()}


def make(
    mode: str,
    micro_batch_size: int,
    policy: Any,
    settings: OptimizerConfig = SETTINGS,
    keep_reference: bool = False,
) -> Trainer:
    if mode == "sharded":
        shard(policy)
    trainer = Trainer(policy, settings, micro_batch_size, keep_reference)
    if mode == UNEVEN:
        slowest = 0.2 / (world_size() - 1)
        trainer.division = Division([0.8, *[slowest] * (world_size() - 1)])
    return trainer


def updates(mode: str, minibatch: int = 4, micro: int = 2, **options: Any) -> dict[str, Any]:
    """Three, each of two epochs; ``options[i]`` is for the ``i``-th."""
    subject = make(mode, micro, Toy())
    metrics = []
    for seed in range(3):
        chosen = {name: values[seed] for name, values in options.items()}
        metrics.append(
            subject.update(
                rows(SIZE, seed=seed), loss, minibatches(SIZE, 2, minibatch, seed), **chosen
            )
        )
    return {"metrics": metrics, "weights": subject.weights(), "state": subject.state()}


def beside(index: int) -> list[ExtraLoss]:
    return [ExtraLoss(rows(1 + index, 0.0, seed=index), loss, 0.3)]


def only_touched(mode: str) -> dict[str, Any]:
    """A rank reads only its own rows."""
    subject = make(mode, 2, Toy())
    batch = rows(SIZE)
    mine = rows_of_rank(minibatches(SIZE, 1, 4, 0), 2, subject.division)
    batch.x = torch.full_like(batch.x, float("nan")).index_copy(0, mine, batch.x[mine])
    return {
        "metrics": [subject.update(batch, loss, minibatches(SIZE, 1, 4, 0))],
        "weights": subject.weights(),
    }


def not_finite(mode: str) -> dict[str, Any]:
    """All ranks refuse the step for any rank with that row; the next step is taken."""
    subject = make(mode, 2, Toy())
    spoilt = rows(SIZE, uncounted=0.0)
    spoilt.x[3] = float("inf")
    refused = 0
    before = {name: value.clone() for name, value in subject.weights().items()}
    try:
        subject.step(spoilt, loss)
    except FloatingPointError:
        refused = 1
    after = {name: value.clone() for name, value in subject.weights().items()}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return {
        "refused": refused,
        "metrics": [subject.step(rows(SIZE), loss)],
        "weights": subject.weights(),
    }


def reference(mode: str) -> dict[str, Any]:
    """The policy before and after, through its methods: each row by one rank, for all."""
    subject = make(mode, 2, Toy(), keep_reference=True)
    subject.update(rows(SIZE), loss, minibatches(SIZE, 1, 4, 0))

    @torch.no_grad()
    def seen() -> Tensor:
        division = subject.division
        return map_rows(
            lambda part: subject.policy.evaluate(part)[1], rows(SIZE).x, 2, division=division
        )

    with subject.kept_weights(REFERENCE):
        first = seen()
    return {
        "first": first,
        "now": seen(),
        "metrics": [subject.step(rows(SIZE), loss)],
        "weights": subject.weights(),
    }


class Exact(LinearPolicy):
    """In float64."""

    def encode(self, inputs: Inputs) -> Tensor:
        return super().encode(inputs).double()


def ppo(mode: str, lora: int, kl_coef: float, **keys: Any) -> dict[str, Any]:
    """Three updates of two epochs as a trainer makes them; with ``kl_coef`` from the reference of the initial policy."""
    settings = PPOConfig(kl_coef=kl_coef, epochs=2, minibatch_size=4, target_kl=None, **keys)
    policy = with_critic(Exact(LinearOptions()))
    add_lora(policy, LoraOptions(rank=lora), 0)
    policy.double()
    algorithm = PPO(settings, 1.0)
    metrics = []
    batch = ppo_batch(algorithm, policy)
    subject = OnPolicyUpdater(
        make(mode, 1, policy, SETTINGS, keep_reference=algorithm.keeps_reference),
        0,
        1.0,
        reuse_frozen=True,
    )
    for iteration in range(3):
        reference = subject.reference(batch.calls) if kl_coef else None
        known = replace(batch, calls=replace(batch.calls, reference=reference))
        metrics.append(subject.update(known, algorithm, False, iteration, iteration))
    return {
        "metrics": metrics,
        "weights": subject.trainer.weights(),
        "state": subject.trainer.state(),
    }


def enough(metrics: dict[str, float]) -> bool:
    return metrics["loss"] < 1.0


SCENARIOS: dict[str, Callable[[str], dict[str, Any]]] = {
    "odd minibatches": updates,
    "a minibatch of one row": partial(updates, minibatch=1),
    "a pass more on one rank": partial(updates, minibatch=7, micro=1),
    "enough": partial(updates, enough=[enough] * 3),
    "the critic first": partial(updates, critic_only=[True, False, True]),
    "beside": partial(updates, beside=[beside] * 3),
    "only touched": only_touched,
    "not finite": not_finite,
    "reference": reference,
    "LoRA": partial(ppo, lora=2, kl_coef=0.0),
    "LoRA, each rank with its own rows": partial(ppo, lora=2, kl_coef=0.0, row_groups=4),
    "LoRA with KL": partial(ppo, lora=2, kl_coef=0.3),
    "all weights with KL": partial(ppo, lora=0, kl_coef=0.3),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: run("alone") for name, run in SCENARIOS.items()}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mode", [*MODES, UNEVEN])
def test_ranks_do_not_change_the_result(
    tmp_path: Path, alone: dict[str, Any], mode: str, count: int
) -> None:
    first, *others = on_ranks(
        lambda rank: {name: run(mode) for name, run in SCENARIOS.items()}, tmp_path, count
    )
    for name, expected in alone.items():
        torch.testing.assert_close(
            first[name],
            expected,
            rtol=1e-9,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        for other in others:
            assert other[name]["metrics"] == first[name]["metrics"], (
                "bit-identical, otherwise ranks would diverge"
            )
            assert other[name]["weights"].keys() == (
                set() if mode == "sharded" else expected["weights"].keys()
            )
    assert all(
        alone[name]["metrics"][2]["actor/kl_loss"] > 1e-3
        for name in ("LoRA with KL", "all weights with KL")
    )
    assert (
        alone["enough"]["metrics"][2]["actor/updates"]
        < 4
        == alone["odd minibatches"]["metrics"][2]["actor/updates"]
    )
    assert alone["not finite"]["refused"] == 1
    assert not any(
        ".exp_avg" in name and "blocks" in name for name in critic_only(mode, tmp_path)[0]
    ), "no Adam state of weights that did not train"


def critic_only(mode: str, folder: Path) -> list[Any]:
    def work(rank: int) -> dict[str, Tensor]:
        subject = make(mode, 2, Toy())
        subject.update(rows(SIZE), loss, minibatches(SIZE, 1, 4, 0), critic_only=True)
        return subject.state()

    return on_ranks(work, folder)


class Collectives(TorchDispatchMode):
    """Counts collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation.namespace == "c10d":
            name = operation.overloadpacket.__name__
            self.counts[name] = self.counts.get(name, 0) + 1
        return operation(*args, **(kwargs or {}))


def collectives(mode: str, micro: int) -> dict[str, int]:
    """Of one step on 8 rows."""
    subject = make(mode, micro, Toy())
    with Collectives() as counter:
        subject.step(rows(8, 0.0), loss)
    return counter.counts


@pytest.mark.parametrize("passes", [1, 4])
def test_replicas_communicate_once_per_step_and_shards_in_every_pass(
    tmp_path: Path, passes: int
) -> None:
    """Two all-reduces, of a step's gradients and statistics; the sharded policy's is that of the norm, in place of the gradients'."""
    replicated, sharded = (
        on_ranks(lambda rank, mode=mode: collectives(mode, 4 // passes), tmp_path)[0]
        for mode in MODES
    )
    assert replicated == {"allreduce_": 2}
    groups = 3  # two blocks, and the head
    assert sharded == {
        "allreduce_": 2,
        "_reduce_scatter_base_": groups * passes,
        "_allgather_base_": 2 * groups * passes,
    }


# real policies

ROWS = 5


def oft(folder: Path, dtype: str = "float32") -> Policy:
    policy = small_oft(folder, {"dtype": dtype}, film=True)
    add_lora(policy, LoraOptions(rank=2), 0)
    checkpoint_blocks(policy)
    return policy


def pi0(folder: Path) -> Policy:
    policy = small_pi0(folder, frozen_vlm=True)
    add_lora(policy, LoraOptions(rank=2), 0)
    return policy


POLICIES: dict[str, Callable[[Path], Policy]] = {
    "linear": lambda folder: LinearPolicy(LinearOptions()),
    "oft": oft,
    "pi0": pi0,
}
LOW = "oft, bfloat16"
"""Its gradients are sums of fewer bits, whose order and rounding depend on the micro-batches, and so on the ranks."""


def ppo_batch(algorithm: PPO, policy: Policy) -> Batch:
    calls = synthetic.calls(policy, ROWS, Settings(0, 1.0, ROWS, False), 1)
    advantage, target = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(2))
    return replace(algorithm.weighted(calls, advantage), target=target)


@pytest.mark.parametrize("name", [*POLICIES, pytest.param(LOW, marks=pytest.mark.slow)])
def test_ranks_do_not_change_the_result_of_a_real_policy(tmp_path: Path, name: str) -> None:
    policy = with_critic(
        oft(tmp_path / "model", "bfloat16") if name == LOW else POLICIES[name](tmp_path / "model")
    )
    algorithm = PPO(PPOConfig(), 1.0)
    batch = ppo_batch(algorithm, policy)

    def learn(mode: str) -> dict[str, Tensor]:
        subject = make(mode, 2, policy, OptimizerConfig(1e-3, 1e-3, 0.5))
        for seed in range(3):
            with torch.no_grad():
                inputs = policy.precompute(batch.calls.inputs)
            known = replace(batch, calls=replace(batch.calls, inputs=inputs))
            subject.update(
                known,
                lambda policy, part: algorithm.loss(policy, part, False),
                minibatches(len(known), 1, 3, seed),
            )
        return subject.weights()

    found = {mode: on_ranks(lambda rank, mode=mode: learn(mode), tmp_path)[0] for mode in MODES}
    before = {key: value.detach().clone() for key, value in policy.named_parameters()}
    alone = learn("alone")
    assert sum(not torch.equal(value, before[key]) for key, value in alone.items()) > len(alone) / 2
    for mode in MODES:
        if name == LOW:
            apart, moved = (
                torch.cat([(value - of[key]).flatten() for key, value in alone.items()]).norm()
                for of in (found[mode], before)
            )
            assert apart < 0.2 * moved
            continue
        torch.testing.assert_close(
            found[mode], alone, rtol=0, atol=1e-5, msg=lambda text, mode=mode: f"{mode}: {text}"
        )
