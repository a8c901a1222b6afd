"""A sharded policy: its methods, refusals and checkpoints."""

from __future__ import annotations

import ast
import copy
import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_vla import training
from rlinf_vla.algorithms.base import OptimizerConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.core.protocols import Policy
from rlinf_vla.features.planner import synthetic
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions
from rlinf_vla.rollout.actor import Settings
from rlinf_vla.testing.policy_calls import with_critic
from rlinf_vla.training.checkpoint import load_checkpoint, save_checkpoint
from rlinf_vla.training.lora import add_lora, merged_lora
from rlinf_vla.training.ranks import local_gradient, local_shard, minibatches
from rlinf_vla.training.sharding import shard
from rlinf_vla.training.trainer import REFERENCE
from tests.models.test_openvla_oft import small as small_oft
from tests.models.test_pi0 import small as small_pi0
from tests.models.tiny_openvla import ASSET, smaller_directory
from tests.parity.fixtures import ROOT
from tests.training.footprint import Footprint, footprint
from tests.training.processes import on_ranks
from tests.training.test_checkpoint import build, learn
from tests.training.test_data_parallel import MODES, Toy, loss, make
from tests.training.test_trainer import rows


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return build(smaller_directory(tmp_path_factory.mktemp("model")))[0]


def same(first: dict[str, Tensor], second: dict[str, Tensor], limit: float = 0.0) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=limit)


# checkpoints


def part(
    fresh: Policy,
    decay: float | None,
    mode: str,
    steps: range,
    start: Path | None = None,
    written: Path | None = None,
) -> dict[str, Any]:
    """Some steps of a run, from a checkpoint to a checkpoint."""
    policy = copy.deepcopy(fresh)
    trainer = make(mode, 3, policy, OptimizerConfig(3e-4, 3e-4, 1.0, ema_decay=decay))
    if start is not None:
        assert load_checkpoint(start, policy, trainer) == {"iteration": 1}
    learn(policy, trainer, steps)
    if written is not None:
        assert (
            save_checkpoint(written, policy, trainer, {"iteration": 1}, 1)
            == written / "step_000001"
        )
    return {"weights": trainer.weights(), "state": trainer.state()}


@pytest.mark.parametrize(
    ("before", "afters", "decay"),
    [
        ("alone", ["sharded"], None),
        ("sharded", ["alone", "replicated"], None),
        ("alone", ["sharded"], 0.9),
        ("sharded", ["alone"], 0.9),
    ],
)
def test_a_run_resumes_with_another_number_of_ranks(
    fresh: Policy, tmp_path: Path, before: str, afters: list[str], decay: float | None
) -> None:
    """A checkpoint is read bit for bit as written; later steps differ by rounding."""

    def run(mode: str, *what: Any) -> dict[str, Any]:
        return (
            part(fresh, decay, mode, *what)
            if mode == "alone"
            else on_ranks(lambda rank: part(fresh, decay, mode, *what), tmp_path)[0]
        )

    saved = run(before, range(1), None, tmp_path)
    written = tmp_path / "step_000001"
    expected = part(fresh, decay, "alone", range(2))
    for after in afters:
        read = run(after, range(0), written)
        end = run(after, range(1, 2), written)
        for kind in ("weights", "state"):
            same(read[kind], saved[kind])
            same(end[kind], expected[kind], 1e-5)
    reader = copy.deepcopy(fresh)  # as an evaluation does
    load_checkpoint(written, reader)
    acts = {name: value for name, value in reader.named_parameters() if name in saved["weights"]}
    same({name: value.detach() for name, value in acts.items()}, saved["weights"])


def test_a_full_disk_leaves_no_rank_waiting(
    fresh: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says so, and the others have given all of their parts."""

    def full(spread: object, parts: Iterator[object], path: Path) -> None:
        next(parts)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def save(rank: int) -> str:
        policy = copy.deepcopy(fresh)
        trainer = make("sharded", 3, policy, OptimizerConfig(3e-4, 3e-4, 1.0))
        learn(policy, trainer, range(1))
        monkeypatch.setattr("rlinf_vla.training.checkpoint.write_parts", full)
        try:
            save_checkpoint(tmp_path / "run", policy, trainer, {"iteration": 1}, 1)
        except OSError as error:
            return str(error.strerror)
        return "given"

    assert on_ranks(save, tmp_path) == ["No space left on device", "given"]
    assert not any((tmp_path / "run").glob("*/COMPLETE"))


# methods that work


@pytest.mark.parametrize(
    ("make_policy", "rank"),
    [
        pytest.param(
            lambda path: small_oft(path, {"dtype": "bfloat16"}, proprio=True), 2, id="oft"
        ),
        pytest.param(lambda path: small_pi0(path, dtype="bfloat16", frozen_vlm=True), 0, id="pi0"),
    ],
)
def test_a_sharded_policy_acts_and_learns(
    tmp_path: Path, make_policy: Callable[[Path], Policy], rank: int
) -> None:
    """Weights of both dtypes train: OFT's adapters and critic are in float32, its head in bfloat16; π₀'s norms are in float32."""
    policy = with_critic(make_policy(tmp_path / "model"))
    add_lora(policy, LoraOptions(rank=rank), 0)
    inputs = synthetic.calls(policy, 4, Settings(0, 1.0, 4, False), 1).inputs

    def learn_and_act(mode: str) -> dict[str, Any]:
        trainer = make(mode, 2, policy, OptimizerConfig(1e-4, 1e-4, 1.0))
        found = []
        for _ in range(2):
            calls = synthetic.calls(policy, 3, Settings(0, 1.0, 3, False), 1)
            trainer.step(rows(4, 0.0), lambda policy, part: (_squares(policy, inputs, part.y), {}))
            found.append(calls.log_prob)
        return {"acts": found, "weights": trainer.weights()}

    sharded = on_ranks(lambda rank: learn_and_act("sharded"), tmp_path)
    alone = learn_and_act("alone")
    assert torch.equal(sharded[0]["acts"][0], alone["acts"][0])
    assert torch.equal(sharded[0]["acts"][1], sharded[1]["acts"][1])
    assert {value.dtype for value in alone["weights"].values()} == {torch.float32, torch.bfloat16}
    for name, value in alone["weights"].items():
        assert sharded[0]["weights"][name].dtype == value.dtype
        torch.testing.assert_close(sharded[0]["weights"][name], value, rtol=0.01, atol=1e-3)


def _squares(policy: Policy, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    features = policy.encode({name: value[: len(targets)] for name, value in inputs.items()})
    return ((policy.value(features) - targets) ** 2).sum() + policy.pooled(features).square().sum()


# off-loading


class Moving(Toy):
    """A move gives its weights other memory, as one between devices does, and nothing may read the old."""

    def to(self, *where: Any) -> Moving:
        before = [local_shard(parameter).data for parameter in self.parameters()]
        self._apply(torch.clone)
        for piece in before:
            piece.fill_(float("nan"))
        return self


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_rest_between_updates_learn_the_same(
    tmp_path: Path, mode: str, dtype: torch.dtype
) -> None:
    """State and weights can be read while they rest, and a checkpoint be loaded."""

    def work(rank: int) -> list[dict[str, Any]]:
        found = []
        for moves in (False, True):
            trainer = make(
                mode, 2, Moving()._apply(lambda weight: weight.to(dtype)), keep_reference=True
            )
            metrics = []
            seen = []
            for seed in range(3):
                batch = rows(7, seed=seed)
                batch.x = batch.x.to(dtype)
                metrics.append(trainer.update(batch, loss, minibatches(7, 2, 4, seed)))
                if moves:
                    trainer.move("cpu")
                    assert all(
                        each.grad is None
                        for each in (*trainer.parameters.values(), *trainer.trained.values())
                    )
                seen.append(
                    {
                        name: value.clone()
                        for name, value in (trainer.weights() | trainer.state()).items()
                    }
                )
                if moves:
                    trainer.move("cpu")
            with trainer.kept_weights(REFERENCE):
                seen.append({name: value.clone() for name, value in trainer.weights().items()})
            found.append({"metrics": metrics, "seen": seen})
        return found

    for stayed, moved in on_ranks(work, tmp_path):
        assert stayed["metrics"] == moved["metrics"] and len(stayed["metrics"]) == 3
        for one, other in zip(stayed["seen"], moved["seen"], strict=True):
            same(one, other)


def test_sums_of_bfloat16_gradients_are_rounded_once(tmp_path: Path) -> None:
    """In bfloat16, 256 + 1 + 1 would be 256."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))

        def encode(self, x: Tensor) -> Tensor:
            return (self.weight * x[:, None].bfloat16()).sum()

    def work(rank: int) -> Tensor:
        policy: Any = Line()
        shard(policy)
        policy.encode(torch.tensor([256.0 if rank == 0 else 1.0])).backward()
        return local_gradient(policy.weight)

    for gradient in on_ranks(work, tmp_path, 3):
        assert gradient.dtype == torch.bfloat16 and torch.equal(
            gradient, torch.full((2,), 258.0).bfloat16()
        )


# memory


def test_the_footprint_is_the_memory_of_a_rank(tmp_path: Path) -> None:
    def work(rank: int) -> list[int]:
        policy = Toy()
        trainer = make("sharded", 4, policy)
        trainer.step(rows(), loss)
        kept = [local_shard(parameter).nbytes for parameter in policy.parameters()]
        moments = [
            value.nbytes
            for slots in trainer.optimizers["policy"].state.values()
            for slot, value in slots.items()
            if slot != "step"
        ]
        return [sum(kept), sum(moments)]

    expected = footprint(Toy(), 2, sharded=True)
    assert on_ranks(work, tmp_path)[0] == [expected.weights, expected.optimizer]
    block, head = 8 * (9 + 3), 8 * (3 + 1)
    assert expected == Footprint(
        2 * 8 * (6 + 2) + head,
        2 * 8 * (6 + 2) + head,
        2 * (2 * 8 * (6 + 2) + head),
        head + 3 * block,
    )
    whole = 2 * block + head
    assert footprint(Toy(), 2, sharded=False) == Footprint(whole, whole, 2 * whole, whole)
    assert footprint(Toy(), 1, sharded=False) == Footprint(whole, whole, 2 * whole, 0)


LORA = {(1, False): 16.87, (8, False): 16.94, (2, True): 10.00, (8, True): 3.67, (64, True): 1.84}
FULL = {
    (1, False): 135.78,
    (8, False): 135.84,
    (2, True): 70.83,
    (8, True): 19.91,
    (64, True): 5.07,
}


@pytest.mark.parametrize(("rank", "gigabytes"), [(32, LORA), (0, FULL)])
def test_seven_billion_weights(
    tmp_path: Path, rank: int, gigabytes: dict[tuple[int, bool], float]
) -> None:
    """The table in docs/training_ranks.md: OpenVLA-OFT in bfloat16, on the meta device."""
    config = json.loads((ROOT / "manifests/openvla_7b_config_reconstructed.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "dataset_statistics.json"):
        shutil.copyfile(ASSET / name, tmp_path / name)
    with torch.device("meta"):
        policy = OpenVLAOFTPolicy(tmp_path, OpenVLAOFTOptions(dtype="bfloat16"))
    policy.backbone.to(torch.bfloat16)
    add_lora(policy, LoraOptions(rank=rank), 0)
    for (ranks, sharded), expected in gigabytes.items():
        assert footprint(policy, ranks, sharded).total / 1e9 == pytest.approx(expected, abs=0.01)


# refusals


def test_methods_that_a_sharded_policy_refuses(fresh: Policy, tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        policy = fresh
        said = []
        shard(policy)
        for refused in (lambda: merged_lora(policy).__enter__(), lambda: policy.save(tmp_path)):
            with pytest.raises(UserError) as error:
                refused()
            said.append(str(error.value))
        with pytest.raises(UserError) as error:
            shard(Scalar())
        return [*said, str(error.value)]

    for acts, saves, scalar in on_ranks(work, tmp_path):
        assert "no rank holds the whole policy to act with" in acts
        assert "`rlinf-vla export`" in saves
        assert "temperature is a scalar" in scalar


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_different_initial_weights_are_refused(tmp_path: Path, mode: str) -> None:
    def work(rank: int) -> str:
        policy = Toy()
        with torch.no_grad():
            policy.blocks[1].bias[2] += 1e-15 * rank
        with pytest.raises(UserError) as error:
            make(mode, 2, policy)
        return str(error.value)

    for said in on_ranks(work, tmp_path):
        assert said.startswith("trainer ranks begin with different weights (blocks.1.bias): ")


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(()))


def test_sharding_needs_several_ranks() -> None:
    assert not dist.is_initialized()
    with pytest.raises(
        UserError, match=r"cluster\.trainer_sharding=full: there are no trainer ranks"
    ):
        shard(Toy())


def test_an_old_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr("rlinf_vla.training.sharding.OLDEST_TORCH", "99.1")
    with pytest.raises(UserError, match=r"needs torch 99\.1, this is"):
        shard(Toy())


def test_torch_distributed_is_not_imported_before_it_is_used() -> None:
    for path in Path(training.__path__[0]).glob("*.py"):
        tops = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert not re.search(r"torch\.distributed\.", " ".join(map(ast.unparse, tops))), path.name
