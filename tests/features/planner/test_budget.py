"""What takes memory beside the networks: simulators, NCCL, and all workers of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.features.planner.budget import (
    ALWAYS,
    COMMUNICATOR,
    MAIN,
    NCCL,
    PROCESS,
    PUBLISH,
    ROLLOUT,
    SIMULATORS,
    Budget,
    budget,
    setting_of,
)
from rlinf_vla.features.planner.dry_run import choose_rows
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.micro_batches import choose
from rlinf_vla.runtime import recipes

GIGABYTE = 1e9
EIGHT = ("cluster.runtime=ray", "cluster.rollout_workers=8", "cluster.trainer_ranks=8")


def model(*overrides: str) -> MemoryModel:
    keys = ["recipe=maniskill_ppo", "cluster=8gpu", "cluster.plan=given", *overrides]
    return MemoryModel(recipes.read(compose.load("train", keys)))


def counted(model: MemoryModel) -> Budget:
    return budget(model, setting_of(model.recipe), 80 * GIGABYTE)


def sizes(budget: Budget, role: str) -> list[float]:
    return [part.size for part in (*budget.parts, *budget.host) if part.role == role]


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        (("cluster.runtime=ray",), 1),
        (EIGHT, 2),
        ((*EIGHT, "cluster.weights=store"), 1),
        (("cluster.runtime=ray", "cluster.weights=store"), 0),
        ((), 0),
    ],
)
def test_each_group_of_processes_has_buffers_of_nccl(keys: tuple[str, ...], groups: int) -> None:
    assert sum(sizes(counted(model(*keys)), NCCL)) == groups * COMMUNICATOR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_moving_averages_take_a_float32_copy_of_the_trained_weights(dtype: str, rank: int) -> None:
    keys = [
        "recipe=maniskill_sft",
        "model=openvla_oft",
        f"model.options.dtype={dtype}",
        f"model.lora.rank={rank}",
    ]
    plain, averaged = (
        MemoryModel(recipes.read(compose.load("train", [*keys, *more])))
        for more in ((), ("algorithm.ema_decay=0.99",))
    )
    weights = plain.weights()
    numbers = sum(each.numel() for each in plain.policy.parameters() if each.requires_grad)
    held = [
        {(part.name, part.phase): part.size for part in counted(each).parts}
        for each in (plain, averaged)
    ]
    more = {key: size for key, size in held[1].items() if key not in held[0]}
    expected = {
        ("moving averages", ALWAYS): 4 * numbers,
        ("present weights, set aside", ROLLOUT): weights.trained,
    }
    if weights.master:
        expected[("rounded moving averages", PUBLISH)] = weights.trained
    assert more == expected and held[1].items() >= held[0].items()


def test_simulators_stay_on_a_gpu_that_roles_take_in_turns() -> None:
    both = counted(model(*EIGHT, "env.num_envs=64"))
    turns = replace(both, turns=True)
    roles = both.role_peak("trainer"), both.role_peak("rollout worker")
    staying = both.role_peak(SIMULATORS) + both.role_peak(NCCL)
    assert staying > 2 * GIGABYTE, "a GPU simulator"
    assert both.peak == pytest.approx(sum(roles) + staying)
    assert turns.peak == pytest.approx(max(roles) + staying)


def test_a_batch_on_the_gpu_grows_with_environments_and_pixels() -> None:
    few, many, large = (
        sum(sizes(counted(model("env.backend=gpu", *keys)), SIMULATORS))
        for keys in (
            ["env.num_envs=64"],
            ["env.num_envs=256"],
            ["env.num_envs=256", "env.image_size=640"],
        )
    )
    assert 2 * GIGABYTE < few < many < large / 2


def test_processes_that_draw_on_the_gpu_are_counted_and_fewer_are_the_fix() -> None:
    """A machine of 128 cores, one process for each of 64 environments, 0.4 GB each."""
    drawing = model("env.backend=cpu", "env.num_envs=64")
    budget = counted(drawing)
    assert sum(sizes(budget, SIMULATORS)) == pytest.approx(64 * 0.4 * GIGABYTE)
    assert sum(sizes(counted(model("env.backend=cpu", "env.processes=4")), SIMULATORS)) == (
        pytest.approx(4 * 0.4 * GIGABYTE)
    )
    with pytest.raises(UserError, match=r"needs at least 25\.6 GB .*: set env\.processes=2$"):
        choose(drawing, 20 * GIGABYTE)


@pytest.mark.parametrize(("key", "chosen"), [(None, 32), ("env.processes=64", 64)])
def test_processes_become_fewer_until_they_fit_unless_they_are_given(
    key: str | None, chosen: int, capsys: pytest.CaptureFixture[str]
) -> None:
    node = "cluster.nodes=[{gpus: 1, gpu: any, gpu_memory_gb: 20, cpus: 128, memory_gb: 500}]"
    keys = ["recipe=maniskill_ppo", "cluster=1gpu", node, "env.backend=cpu", "env.num_envs=64"]
    config = compose.load("train", [*keys, *([key] if key else [])])
    recipe, preview = choose_rows(config)
    assert recipe.env.processes == config.env.processes == chosen
    assert bool(preview.missing) == (key is not None)
    preview.show(recipe)
    assert ("env.processes=32: more that draw" in capsys.readouterr().out) == (key is None)


@pytest.mark.parametrize(
    ("name", "keys", "draws"),
    [
        ("libero", {}, True),
        ("libero", {"renderer": "osmesa"}, False),
        ("metaworld", {}, True),
        ("metaworld", {"cameras": []}, False),
        ("genesis", {"backend": "cpu"}, True),
    ],
)
def test_simulators_that_draw_with_opengl(name: str, keys: dict[str, object], draws: bool) -> None:
    plugin = plugins.envs()[name]
    one, eight = (plugin.gpu_bytes(plugin.Config(**keys), 8, count) for count in (1, 8))
    assert eight == 8 * one
    assert (one > 0.2 * GIGABYTE) == draws


def test_main_memory_is_that_of_all_workers_of_a_machine() -> None:
    merged = ("model.lora.merge=true", "env.backend=cpu", "env.num_envs=64", "env.processes=16")
    alone, eight = model(*merged), model(*merged, *EIGHT)
    weights = alone.weights()
    for each, workers, processes in ((alone, 1, 1), (eight, 8, 16)):
        parts = {part.name: part for part in counted(each).host}
        before_merging = parts["weights before merging, of each rollout worker"]
        loading = parts[f"weights while they load, {processes} times"]
        assert before_merging.size == workers * weights.merged
        assert loading.size == processes * weights.all
        simulators = [part for name, part in parts.items() if "of them" in name or "sim" in name]
        assert sum(part.size for part in simulators) == 16 * PROCESS
    rows = next(part for part in counted(eight).host if "policy calls" in part.name)
    assert "9 times" in rows.name, "in the object store, and in each rank"


def test_off_loaded_weights_are_in_main_memory() -> None:
    off = counted(model(*EIGHT, "cluster.offload=true", "env.num_envs=64"))
    stays = counted(model(*EIGHT, "env.num_envs=64"))
    names = {part.name for part in off.host} - {part.name for part in stays.host}
    assert names == {"trainer ranks, off the GPU", "rollout workers, off the GPU"}
    assert {part.role for part in off.host} == {MAIN}
