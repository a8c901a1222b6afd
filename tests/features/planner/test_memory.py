"""Memory counted on the meta device, compared with the same passes on real tensors on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.protocols import Policy
from rlinf_vla.features.planner import dry_run, preview, search
from rlinf_vla.features.planner.accounting import (
    Allocations,
    allocated_gradients,
    kernels_of,
    peak_bytes,
)
from rlinf_vla.features.planner.budget import Setting, budget, most_rows_of, setting_of
from rlinf_vla.features.planner.dry_run import choose_rows
from rlinf_vla.features.planner.memory import MemoryModel, weights_of
from rlinf_vla.features.planner.micro_batches import choose
from rlinf_vla.features.planner.synthetic import synthetic_batch
from rlinf_vla.models.openvla.options import OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.runtime.run_directory import save_recipe
from rlinf_vla.telemetry.measurement import saved_for_backward
from rlinf_vla.training.ranks import BUCKET
from tests.forked import Forked

ROWS = 6
TINY = {
    "openvla": ["recipe=maniskill_ppo"],
    "openvla, bfloat16": ["recipe=maniskill_ppo", "model.options.dtype=bfloat16"],
    "openvla_oft, all weights": ["recipe=maniskill_ppo", "model=openvla_oft", "model.lora.rank=0"],
    "pi0": ["recipe=maniskill_ppo", "model=pi0"],
    "pi0, bfloat16": ["recipe=maniskill_ppo", "model=pi0", "model.options.dtype=bfloat16"],
    "pi0, one pass": [
        "recipe=maniskill_ppo",
        "model=pi0",
        "model.options.frozen_vlm=false",
        "cluster.reuse_frozen=false",
    ],
}
OFTEN = ("openvla, bfloat16", "pi0, one pass")
"""Of these, compared for each change."""


@pytest.fixture(autouse=True)
def unaccompanied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks here are tiny: simulators and NCCL beside them would be all that counts."""
    budgets = "rlinf_vla.features.planner.budget"
    monkeypatch.setattr(f"{budgets}.simulator_processes", lambda recipe: 0)
    monkeypatch.setattr(f"{budgets}.COMMUNICATOR", 0.0)


def recipe(*overrides: str) -> Recipe:
    return recipes.read(compose.load("train", ["cluster=laptop", *overrides]))


def test_the_most_that_is_alive_at_one_time_counts() -> None:
    def chain() -> Tensor:
        x = torch.empty(100, device="meta")
        y = x.view(10, 10).exp()
        del x
        return y.exp_().t() @ y

    assert peak_bytes(chain, "cpu") == 2 * 400
    with Allocations() as found:
        for _ in range(3):
            torch.empty(250)
        assert found.now == 0
    assert found.peak == 1000


def test_operations_whose_sizes_are_known_count_as_before() -> None:
    """Results in new memory do; those that are or see an argument, or are several, do not."""

    def call() -> None:
        x = torch.empty(8, 16, device="meta")
        parts = (x + 1).contiguous().chunk(2)
        y = torch.cat([*parts, x.t().contiguous().t()]).add_(1)
        y.sum(0).clone().max(dim=0)

    first = peak_bytes(call, "cpu")
    assert peak_bytes(call, "cpu") == first
    with Allocations() as found:
        kept = [
            torch.ones(4, device="meta", dtype=dtype).mul(2)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float32)
        ]
    assert found.now == sum(each.nbytes for each in kept) == 4 * (4 + 2 + 8 + 4)
    assert [each.dtype for each in kept] == [
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.float32,
    ]


def test_gradient_checkpointing_and_more_rows_show_in_the_peak() -> None:
    model = MemoryModel(recipe("recipe=maniskill_ppo", "model.lora.vision=true"))
    assert model.update(32, True) < 0.5 * model.update(32, False)
    assert model.update(64, False) == pytest.approx(2 * model.update(32, False), rel=0.01)
    assert model.rollout(64) == pytest.approx(2 * model.rollout(32), rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly) for name in TINY],
)
def test_meta_and_cpu_agree_exactly(name: str, checkpointing: bool) -> None:
    """Bytes saved for the backward pass, and peaks of forward and backward pass and of acting.

    In bfloat16 nearly: the CPU keeps a norm's statistics in bfloat16, meta in float32, as CUDA does.
    """
    wanted = recipe(*TINY[name], f"cluster.gradient_checkpointing={str(checkpointing).lower()}")
    model = MemoryModel(wanted)
    policy = builders.build_policy(wanted)
    batch = synthetic_batch(wanted, policy, model.algorithm, ROWS)
    if model.kept:
        with torch.no_grad():
            learnt = policy.precompute(batch.calls.inputs)
        batch = replace(batch, calls=replace(batch.calls, inputs=learnt))
    assert weights_of(policy) == weights_of(model.policy)

    learner, meta = model.learner(checkpointing), model.batch(ROWS)
    assert [tensor.shape for tensor in batch.tensors()] == [
        tensor.shape for tensor in meta.tensors()
    ]
    tolerance = 2e-3 if "bfloat16" in name else 0
    with kernels_of("cpu"):
        for measure in (partial(saved, model), partial(peak, model)):
            assert measure(learner, meta) == pytest.approx(measure(policy, batch), rel=tolerance)
    assert model.rollout(ROWS) == pytest.approx(acting(policy, model), rel=tolerance)


def saved(model: MemoryModel, policy: Policy, batch: object) -> int:
    known = [*policy.parameters(), *policy.buffers(), *batch.tensors()]  # type: ignore[arg-type]
    return saved_for_backward(lambda: model.loss(policy, batch).backward(), known)


def peak(model: MemoryModel, policy: Policy, batch: object) -> int:
    with (
        allocated_gradients([each for each in policy.parameters() if each.requires_grad]),
        Allocations() as found,
    ):
        model.loss(policy, batch).backward()
    return found.peak


@torch.no_grad()
def acting(policy: Policy, model: MemoryModel) -> int:
    with Allocations() as found:
        model.act(
            policy,
            {
                name: torch.zeros_like(value, device="cpu")
                for name, value in model.inputs(ROWS).items()
            },
        )
    return found.peak


def test_imitation_of_a_flow_policy_is_counted_with_all_the_actions_that_it_predicts() -> None:
    model = MemoryModel(recipe("recipe=maniskill_sft", "model=pi0", "model.options.chunk=2"))
    assert (
        model.batch(3).actions.shape == (3, model.policy.horizon, model.policy.spec.action_dim)
        and model.policy.horizon > 2
    )
    model.step(3)


@pytest.mark.parametrize(
    "words", [("model=openvla", "model.options.center_crop=true"), ("model=pi0",)]
)
def test_augmented_images_are_counted(words: tuple[str, ...]) -> None:
    keys = ("recipe=maniskill_sft", *words)
    plain = MemoryModel(recipe(*keys))
    augmented = MemoryModel(recipe(*keys, "algorithm.augmentation=official"))
    found, before = augmented.update(16, False), plain.update(16, False)
    assert found > before if "model=pi0" in words else found == before  # uint8 images as before


def test_gradients_moments_and_masters_are_those_of_the_trainer() -> None:
    wanted = recipe(
        "recipe=maniskill_ppo",
        "model.options.dtype=bfloat16",
        "model.lora.rank=0",
        "rollout.batch_size=8",
    )
    policy = builders.build_policy(wanted)
    trainer = builders.build_trainer(wanted, policy)
    trainer.step(
        synthetic_batch(wanted, policy, trainer.settings, 8),
        partial(trainer.settings.loss, value_only=False),
    )  # type: ignore[attr-defined]
    counted = weights_of(policy)
    trained = trainer.trained
    learnt = [
        each for each in trained.values() if each.grad is not None
    ]  # the vision towers' last blocks are not used
    assert counted.gradients == sum(each.nbytes for each in trained.values())
    assert all(each.grad is not None and each.grad.nbytes == each.nbytes for each in learnt)
    slots = [
        slot
        for optimizer in trainer.optimizers.values()
        for state in optimizer.state.values()
        for slot in state.values()
    ]
    assert sum(slot.nbytes for slot in slots if slot.numel() > 1) == 2 * sum(
        each.nbytes for each in learnt if each.numel() > 1
    )
    assert counted.moments == 2 * counted.gradients
    assert counted.master == sum(trained[name].nbytes for name in trainer.low) > 0


def test_the_published_sizes_are_known_without_the_checkpoint() -> None:
    """openvla-7b has 7,541,237,184 weights (its model.safetensors.index.json: twice as many bytes)."""
    found = OpenVLAPolicy.published_sizes(
        "hf://openvla/openvla-7b@main", OpenVLAOptions(unnorm_key="bridge_orig")
    )
    assert found is not None
    policy = OpenVLAPolicy.without_weights(recipes.asset_path(found[0]), found[1])
    assert sum(each.numel() for each in policy.backbone.parameters()) == 7_541_237_184
    assert found[1].card == "openvla" and found[1].unnorm_key is None
    assert OpenVLAPolicy.published_sizes("/data/my_own", OpenVLAOptions()) is None
    for name in ("pi0_libero", "pi05_libero"):
        sizes = Pi0Policy.published_sizes(f"/data/{name}", Pi0Options())
        assert sizes is not None and recipes.asset_path(sizes[0]).is_dir() and sizes[1].card == name


GIGABYTE = 1e9
MODEL = ["recipe=maniskill_ppo", "cluster=8gpu", "cluster.plan=given"]


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_chosen() -> None:
    model = MemoryModel(recipe(*MODEL))
    roomy = choose(model, GIGABYTE)
    assert roomy.micro_batch_size == 160 and not roomy.gradient_checkpointing, "the whole minibatch"
    some = choose(model, budget(model, replace(roomy, micro_batch_size=64), GIGABYTE).peak / 0.89)
    assert (some.micro_batch_size, some.gradient_checkpointing) == (64, False)
    little = choose(model, budget(model, replace(roomy, micro_batch_size=8), GIGABYTE).peak / 0.89)
    assert little.gradient_checkpointing and little.micro_batch_size > 8
    for found in (roomy, some, little):
        assert budget(model, found, GIGABYTE).peak <= 0.9 * GIGABYTE


def test_a_minibatch_of_whole_groups_has_the_calls_of_their_episodes() -> None:
    """Two groups of four episodes of eight calls, whatever algorithm.minibatch_size says."""
    keys = ["recipe=maniskill_grpo", *MODEL[1:], "cluster.runtime=ray", "algorithm.epochs=1"]
    keys += ["algorithm.groups_per_step=2", "algorithm.group_size=4"]
    model = MemoryModel(recipe(*keys))
    limit = 8 * model.policy.spec.chunk - 1
    for ranks, rows in ((1, 64), (8, 8)):
        model.recipe = recipe(*keys, f"env.episode_limit={limit}", f"cluster.trainer_ranks={ranks}")
        assert most_rows_of(model) == choose(model, GIGABYTE).micro_batch_size == rows
    model.recipe = recipe(*keys, "env.episode_limit=null", "cluster.micro_batch_size=500")
    assert most_rows_of(model) == 500, "nobody knows before the simulator starts"


@pytest.mark.slow
def test_too_little_memory_is_refused_with_the_fix() -> None:
    model = MemoryModel(recipe(*MODEL))
    with pytest.raises(
        UserError, match=r"needs at least 0\.0 GB .* set model\.options\.dtype=bfloat16"
    ):
        choose(model, 1e6)
    model = MemoryModel(recipe(*MODEL, "rollout.batch_size=128"))
    given = setting_of(model.recipe)
    memory = (
        budget(
            model,
            replace(given, micro_batch_size=1, batch_size=1, gradient_checkpointing=True),
            GIGABYTE,
        ).peak
        / 0.89
    )
    with pytest.raises(
        UserError,
        match=r"does not fit .*: set cluster\.micro_batch_size=\d+ .*rollout\.batch_size=\d+",
    ):
        choose(model, memory, given)


def test_roles_on_one_device_add_up_unless_they_take_turns() -> None:
    ray = recipe(
        *MODEL, "cluster.runtime=ray", "cluster.rollout_workers=8", "cluster.trainer_ranks=8"
    )
    model, setting = MemoryModel(ray), setting_of(ray)
    both, turns = (
        budget(model, replace(setting, offload=offload), GIGABYTE) for offload in (False, True)
    )
    roles = [both.role_peak(role) for role in ("trainer", "rollout worker")]
    assert both.peak == sum(roles) and turns.peak == max(roles)


@pytest.mark.parametrize(
    ("keys", "phase"),
    [((), "publishing weights"), (("algorithm.staleness=1", "algorithm.decoupled=true"), "always")],
)
def test_a_broadcast_takes_a_bucket_of_the_trainer_and_a_second_copy_of_workers(
    keys: tuple[str, ...], phase: str
) -> None:
    ray = recipe(
        *MODEL, "cluster.runtime=ray", "cluster.rollout_workers=8", "cluster.trainer_ranks=8", *keys
    )
    by_store = replace(ray, cluster=replace(ray.cluster, weights="store"))
    with_copies, without = (
        budget(model := MemoryModel(each), setting_of(each), GIGABYTE) for each in (ray, by_store)
    )
    added = [part for part in with_copies.parts if part not in without.parts]
    trained = model.weights().trained
    assert [(part.role, part.phase, part.size) for part in added] == [
        ("trainer", phase, min(trained, BUCKET)),
        ("rollout worker", phase, trained),
    ]


def test_null_is_replaced_by_what_fits_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    config = compose.load("train", MODEL)
    assert config.cluster.micro_batch_size is None
    choose_rows(config)
    assert config.cluster.micro_batch_size == 160
    config.cluster.micro_batch_size = 40
    save_recipe(tmp_path / "recipe.yaml", config)
    again = compose.load("train", MODEL)
    choose_rows(again, tmp_path)
    assert again.cluster.micro_batch_size == 40


@pytest.mark.parametrize(("gigabytes", "kept"), [(1000, True), (1, False)])
def test_prefixes_are_kept_where_main_memory_has_room(
    gigabytes: float, kept: bool, tmp_path: Path
) -> None:
    nodes = f"cluster.nodes=[{{gpus: 1, gpu: any, memory_gb: {gigabytes}}}]"
    pi0 = ["model=pi0", "model.checkpoint=asset://pi0_tiny_pushcube", "env.num_envs=4096"]
    keys = [*MODEL, "model.options.prompt_length=null", nodes, *pi0]
    config = compose.load("train", keys)
    assert config.cluster.reuse_frozen is None
    choose_rows(config)
    assert config.cluster.reuse_frozen is kept
    config.cluster.reuse_frozen = not kept
    save_recipe(tmp_path / "recipe.yaml", config)
    resumed = compose.load("train", keys)
    choose_rows(resumed, tmp_path)
    assert resumed.cluster.reuse_frozen is not kept


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (("model=pi0", "model.checkpoint=asset://pi0_tiny_pushcube"), "cluster.reuse_frozen"),
        ((), "model.lora.merge"),
    ],
)
def test_too_little_main_memory_beside_a_gpu_is_refused_with_the_key_that_saves_most(
    keys: tuple[str, ...], key: str
) -> None:
    fixed = ("model.options.prompt_length=null", "cluster.reuse_frozen=true")
    model = MemoryModel(recipe(*MODEL, *fixed, *keys))
    found = budget(model, setting_of(model.recipe), GIGABYTE)
    needed = found.host_peak
    found.check_host(needed / 0.89)
    with pytest.raises(
        UserError, match=rf"^main memory: .* may be filled: set {key}=false, which saves"
    ):
        found.check_host(needed / 0.91)


def test_a_full_device_is_refused_after_the_table_with_the_number_that_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = [*MODEL, "model.options.dtype=bfloat16", "model.lora.rank=0"]
    needed = budget(MemoryModel(recipe(*keys)), Setting(1, 1, True), GIGABYTE).peak
    node = f"{{gpus: 1, gpu: small, gpu_memory_gb: {needed / 1e9}, memory_gb: 32}}"
    with pytest.raises(
        UserError,
        match=r"needs at least .*, or use 2 such GPUs \(.*cluster\.trainer_sharding=full\)$",
    ):
        dry_run.run(compose.load("train", [*keys, f"cluster.nodes=[{node}]"]))
    assert "Adam's moments" in capsys.readouterr().out


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_a_dry_run_says_which_have_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"^this machine has no CUDA device"):
        dry_run.run(compose.load("train", ["recipe=maniskill_ppo", "cluster=1gpu"]))
    shown = capsys.readouterr().out
    assert (
        "memory per device" in shown
        and "of 24.0 GB" in shown
        and "model.options.dtype=bfloat16 takes half" in shown
    )
    assert all(
        f"GPU of {size} GB: fits, set cluster.micro_batch_size=2560" in shown
        for size in (24, 40, 80)
    )
    monkeypatch.setattr(preview, "GPUS", (1e7, 4e8, 4e9))
    on_cores = ["recipe=maniskill_ppo", "cluster=1gpu", "env.backend=cpu"]
    with pytest.raises(UserError):
        dry_run.run(compose.load("train", on_cores))
    lines = [
        line.partition(": ")[2]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("GPU of")
    ]
    starts = (
        "does not fit, ",
        "fits, set cluster.micro_batch_size=",
        "fits, set cluster.micro_batch_size=",
    )
    assert len(lines) == 3 and all(map(str.startswith, lines, starts))


@pytest.mark.usefixtures("no_gpu")
def test_a_published_checkpoint_that_is_not_here_is_counted_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenVLAPolicy, "sizes", {"": "asset://openvla_oft_plus_tiny_libero"})
    directory = "/data/openvla-7b-oft-finetuned-libero-spatial"
    wanted = [
        "recipe=libero_grpo",
        f"model.checkpoint={directory}",
        "model.options.head=l1",
        "cluster=1gpu",
    ]
    with pytest.raises(
        UserError,
        match=rf"^model.checkpoint={directory} is not there: .*; this machine has no CUDA .*; model.options.head=l1",
    ):
        dry_run.run(compose.load("train", wanted))
    assert "recorded policy calls" in capsys.readouterr().out
    with pytest.raises(UserError, match="is not there: give the directory"):
        dry_run.run(
            compose.load(
                "train", ["recipe=maniskill_ppo", "model.checkpoint=/data/my_own", "cluster=1gpu"]
            )
        )


@pytest.mark.usefixtures("no_gpu")
def test_a_plan_for_a_gpu_that_is_not_here_prints_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UserError, match=r"^this machine has no CUDA device"):
        search.run(compose.load("plan", ["recipe=maniskill_ppo", "cluster=1gpu"]))
    shown = capsys.readouterr().out
    assert (
        shown.index("macro flow of ppo")
        < shown.index("memory per device")
        < shown.index("GPU of 24 GB: fits")
    )


@pytest.mark.slow
def test_a_dry_run_loads_nothing(forked: Forked, tmp_path: Path) -> None:
    dry = ("train", "recipe=maniskill_ppo", "cluster=laptop", "--dry-run")
    found = forked(dry, tmp_path)
    assert found.returncode == 0, found.stderr
    assert all(
        each in found.stdout
        for each in ("memory per device", "Adam's moments", "micro-batches of 320")
    )
    missing = forked([*dry, "model.checkpoint=asset://openvla_tiny"], tmp_path)
    assert (
        missing.returncode == 2
        and len(missing.stderr.splitlines()) == 1
        and "no model.safetensors" in missing.stderr
    )
    assert not (tmp_path / "runs").exists()
