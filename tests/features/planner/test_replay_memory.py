"""Counted memory of off-policy algorithms, compared with real steps of the trainer on the CPU."""

from __future__ import annotations

import pytest
import torch

from rlinf_vla.algorithms.dagger import DAgger
from rlinf_vla.algorithms.off_policy import ReplayLearner
from rlinf_vla.algorithms.sac import SAC
from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Policy
from rlinf_vla.core.transitions import Transitions
from rlinf_vla.core.types import Tensors
from rlinf_vla.features.planner import dry_run
from rlinf_vla.features.planner.accounting import Allocations, kernels_of
from rlinf_vla.features.planner.budget import (
    ALWAYS,
    NCCL,
    ROLLOUT,
    SIMULATORS,
    UPDATE,
    budget,
    most_rows_of,
    setting_of,
)
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.micro_batches import choose, least
from rlinf_vla.features.planner.synthetic import observation, records
from rlinf_vla.runtime import builders, recipes

ROWS = 6
LARGE = 1e12
KEYS = ["cluster=laptop", f"algorithm.batch_size={ROWS}"]
NARROW = "algorithm.hidden=32"
RUNS = {
    "sac": ["recipe=maniskill_sac"],
    "co-training": ["recipe=maniskill_rlpd", "algorithm.sft_coef=1.0"],
    "dsrl": ["recipe=maniskill_dsrl"],
    "cal_ql": ["recipe=maniskill_cal_ql", "algorithm.online_conservative_coef=0"],
    "adapters": [
        "recipe=maniskill_sac",
        "model=openvla",
        "model.checkpoint=asset://openvla_tiny_pushcube",
        "model.lora.rank=4",
    ],
    "dagger": ["recipe=maniskill_dagger"],
    "distillation": [
        "recipe=maniskill_dagger",
        "model=openvla",
        "model.checkpoint=asset://openvla_tiny_pushcube",
        "algorithm.beta=null",
        "algorithm.teacher=asset://openvla_tiny_pushcube",
        "algorithm.loss=forward_kl",
    ],
}


def recipe(*overrides: str) -> Recipe:
    narrow = [] if overrides[0] == "recipe=maniskill_dagger" else [NARROW]
    return recipes.read(compose.load("train", [*KEYS, *narrow, *overrides]))


def stored(wanted: Recipe, policy: Policy, algorithm: ReplayLearner) -> Tensors:
    """Records as the replay has them."""
    settings = builders.actor_settings(wanted, 1.0)
    if not isinstance(algorithm, DAgger):
        return algorithm.stored(records(policy, ROWS, settings, 0.9))
    inputs = policy.prepare(observation(policy.spec, 1))
    with torch.no_grad():
        record = algorithm.record(policy, inputs, policy.act(policy.encode(inputs), None, 1.0))
    return {
        name: value.expand(ROWS, *value.shape[1:])
        if name in inputs or "latent" in name
        else value.new_zeros(ROWS, *value.shape[1:])
        for name, value in record.items()
    }


def copied(rows: Tensors) -> Tensors:
    return {name: value.clone() for name, value in rows.items()}


@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, False) for name in RUNS), ("adapters", True)]
)
def test_counted_bytes_are_those_of_a_step(name: str, checkpointing: bool) -> None:
    """All that is held between steps exactly; the peak of a step, with its gradients, nearly: each
    gradient is counted once more while it is computed."""
    wanted = recipe(*RUNS[name], f"cluster.gradient_checkpointing={str(checkpointing).lower()}")
    found = budget(MemoryModel(wanted), setting_of(wanted), LARGE)
    held = {part.name: part.size for part in found.parts if part.phase == ALWAYS}
    policy = builders.build_policy(wanted)
    trainer = builders.build_trainer(wanted, policy)
    algorithm = builders.build_algorithm(wanted)
    rows = stored(wanted, policy, algorithm)

    def step() -> None:
        batch = Transitions(copied(rows), copied(rows))
        algorithm.step(trainer, batch, torch.Generator().manual_seed(0), 0, 0, lambda: batch)

    step()
    trained = sum(each.nbytes for each in trainer.trained.values())
    weights = ("frozen weights", "adapters", "weights trained in full", "critic")
    assert sum(held.get(each, 0) for each in weights) == sum(
        each.nbytes for each in (*policy.parameters(), *policy.buffers())
    )
    assert held["gradients"] == trained
    learnt = sum(each.nbytes for each in trainer.trained.values() if each.grad is not None)
    slots = [
        slot
        for optimizer in trainer.optimizers.values()
        for state in optimizer.state.values()
        for slot in state.values()
    ]
    assert sum(slot.nbytes for slot in slots if slot.numel() > 1) == pytest.approx(
        2 * learnt, abs=8
    )  # alpha is one number
    assert held["Adam's moments"] == 2 * trained
    teacher = trainer.teacher
    assert held.get("teacher", 0) == (
        0
        if teacher is None
        else sum(each.nbytes for each in (*teacher.parameters(), *teacher.buffers()))
    )
    assert held.get("moving averages", 0) == sum(
        each.nbytes for each in trainer.target.parameters()
    )

    counted = sum(part.size for part in found.parts if part.phase == UPDATE) + learnt
    with kernels_of("cpu"), Allocations() as measured:
        step()
    assert 0.95 * measured.peak <= counted <= 1.5 * measured.peak


def test_a_rollout_is_counted_without_a_critic() -> None:
    model = MemoryModel(recipe("recipe=maniskill_sac"))
    parts = budget(model, setting_of(model.recipe), LARGE).parts
    assert [part.size for part in parts if part.phase == ROLLOUT] == [
        model.rollout(model.recipe.rollout.batch_size)
    ]


def test_a_trainer_rank_has_room_for_more_rows_than_its_share() -> None:
    """Rows are drawn at random: with 256 on 4 ranks, more than 112 on any are 7 standard deviations away."""
    keys = ["recipe=maniskill_sac", "cluster.runtime=ray", "algorithm.batch_size=256"]
    assert [
        most_rows_of(MemoryModel(recipe(*keys, f"cluster.trainer_ranks={ranks}")))
        for ranks in (1, 2, 4)
    ] == [256, 196, 112]


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_refused_with_the_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = [
        *RUNS["adapters"],
        "model.options.dtype=bfloat16",
        "algorithm.batch_size=512",
        "cluster=1gpu",
    ]
    model = MemoryModel(recipe(*keys))
    roomy = choose(model, LARGE)
    assert roomy.micro_batch_size == 512 and "micro_batch_size" not in roomy.overrides()
    checkpointing = choose(model, budget(model, roomy, LARGE).peak / 0.95)
    assert checkpointing.gradient_checkpointing and checkpointing.micro_batch_size == 512, (
        "never a part of a batch"
    )
    gigabytes = budget(model, checkpointing, LARGE).peak / 2e9
    node = f"{{gpus: 1, gpu: small, gpu_memory_gb: {gigabytes}}}"
    with pytest.raises(
        UserError,
        match=r"needs at least .*: lower algorithm\.batch_size, or set algorithm\.frozen_backbone=true",
    ):
        dry_run.run(
            compose.load(
                "train", [*keys, f"cluster.nodes=[{node}]", "cluster.micro_batch_size=null"]
            )
        )
    assert "moving averages" in capsys.readouterr().out


@pytest.mark.slow
def test_roles_that_do_not_take_turns_are_never_off_loaded() -> None:
    """Only the flow of on-policy algorithms off-loads, so the roles of others add up on a device."""
    node = "cluster.nodes=[{gpus: 1, gpu: any}]"
    model = MemoryModel(
        recipe(
            *RUNS["adapters"],
            "model.options.dtype=bfloat16",
            "cluster=1gpu",
            node,
            "cluster.runtime=ray",
            "env.processes=1",
        )
    )
    needed = least(model, LARGE)
    roles = ("trainer", "rollout worker", SIMULATORS, NCCL)
    assert needed.peak == sum(map(needed.role_peak, roles))
    assert not choose(model, needed.peak / 0.85).offload
    with pytest.raises(UserError, match=r"needs at least .*: lower algorithm\.batch_size"):
        choose(model, needed.peak / 0.95)


def test_a_loss_whose_sizes_depend_on_values_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        SAC, "step", lambda self, trainer, batch, *rest: batch.now["reward"].nonzero()
    )
    keys = [
        *KEYS,
        "recipe=maniskill_sac",
        "cluster=1gpu",
        "cluster.nodes=[{gpus: 1, gpu: any}]",
        "cluster.micro_batch_size=null",
    ]
    dry_run.run(compose.load("train", keys))
    shown = capsys.readouterr().out
    assert (
        "sizes that depend on values, and its memory is not counted" in shown
        and "Adam's moments" in shown
    )
