"""Profiles predicted from published numbers, against closed forms, on a packaged tiny network."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace

import pytest
import torch

from rlinf_vla.cli import compose
from rlinf_vla.config.cluster import NodeConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.envs.gymnasium.config import GymnasiumConfig
from rlinf_vla.features.planner.devices import DEVICES, SIMULATORS, Assumptions
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.profile import CPU, GPU, Cost, Profile
from rlinf_vla.features.planner.profiles import profiles_for
from rlinf_vla.features.planner.published import (
    CountedWork,
    measured_simulation,
    published,
    rates_of,
    simulation_of,
)
from rlinf_vla.features.planner.rates import measured_rates
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.machines import Cluster

H100, L4 = "nvidia-h100-80gb-hbm3", "nvidia-l4"
PERFECT = Assumptions(
    training=1.0, inference=1.0, bandwidth=1.0, host=1.0, dispatch=0.0, simulation=1.0
)


def recipe(*more: str) -> Recipe:
    return recipes.read(
        compose.load("plan", ["recipe=maniskill_ppo", "cluster=8gpu", "env.backend=gpu", *more])
    )


@functools.cache
def counted(*more: str) -> CountedWork:
    return CountedWork(MemoryModel(recipe(*more)))


def profile(work: CountedWork, name: str, assumed: Assumptions = PERFECT) -> Profile:
    """The profile of a machine with GPUs of type ``name``, for which all rates are published."""
    node = NodeConfig(gpus=8, gpu=name)
    simulation = simulation_of(work.model, node, assumed)
    assert simulation is not None
    rates, remark = rates_of(node)
    assert remark is None
    return published(work, node, simulation, rates, assumed)


def test_costs_are_the_counted_work_at_the_devices_rates() -> None:
    work = counted()
    found = profile(counted(), H100)
    device = DEVICES[H100]
    for name in ("act", "value", "reference", "update"):
        for rows in (1, 512):
            least = work.calls[name].seconds(rows, 1e12 * device.tf32, 1e9 * device.bandwidth)
            assert found.cost(name).of(rows) == pytest.approx(least, rel=0.2), (
                "a line through sizes up to 512"
            )
            assert found.cost(name).on == GPU
    policy = work.model.policy
    stored = work.model.weights()
    trained = sum(each.numel() for each in policy.parameters() if each.requires_grad)
    assert found.cost("optimise").fixed == pytest.approx(
        (4 * 4 + 2 * 8 + 2 * 4) * trained / (1e9 * device.bandwidth)
    )
    assert found.cost("publish").fixed == pytest.approx(4 * trained / (1e9 * device.host))
    assert (found.bytes.weights, found.bytes.trained, found.bytes.gradients) == (
        stored.all,
        stored.trained,
        stored.gradients,
    )
    assert found.assumed and "PREDICTED from published numbers" in found.note and found.bus == 460e9
    assert Profile.of(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    ("share", "operation"),
    [
        ("host", "publish"),
        ("bandwidth", "optimise"),
        ("dispatch", "update"),
        ("simulation", "simulate"),
        ("simulation", "reset"),
    ],
)
def test_each_assumption_changes_what_it_names(share: str, operation: str) -> None:
    values = (0.1, 0.2) if share == "dispatch" else (1.0, 0.5)
    fast, slow = (profile(counted(), H100, replace(PERFECT, **{share: value})) for value in values)
    assert slow.cost(operation).of(1) == pytest.approx(2 * fast.cost(operation).of(1))
    assert slow.cost("act").of(1) == pytest.approx(fast.cost("act").of(1)) or share == "bandwidth"


def test_simulators_reproduce_the_published_rates() -> None:
    gpu, cpu = SIMULATORS["maniskill", "gpu"], SIMULATORS["libero", "cpu"]
    for environments, frames_per_s in ((4, 1331), (16, 3200), (64, 5326), (512, 6741)):
        fixed, each = gpu.chunk(1, 1, 640 * 480)
        assert environments / (fixed + environments * each) == pytest.approx(frames_per_s, rel=0.05)
    assert 1 / sum(cpu.chunk(1, 2, 256**2)) == pytest.approx(7.3, rel=0.01)


def test_simulators_on_cores_and_on_gpus() -> None:
    on_cores = counted("env.backend=cpu")
    each_call = 2 * 3.0e-3 + 1.6e-3 + 1.9e-7 * 64**2
    assert profile(on_cores, L4).cost("simulate") == Cost(0.0, each_call), (
        "two control steps and an image"
    )
    there = profile(counted(), "nvidia-geforce-rtx-4090", replace(PERFECT, simulation=0.5))
    assert there.cost("simulate") == profile(counted(), L4).cost("simulate"), (
        "the published GPU reaches all of its rate"
    )


@pytest.mark.parametrize(("environments", "on"), [(64, GPU), (32, CPU)])
def test_the_planner_simulates_where_the_run_does(environments: int, on: str) -> None:
    work = counted("env.backend=auto", f"env.num_envs={environments}")
    assert profile(work, H100).cost("simulate").on == on


def test_the_length_of_episodes_is_the_tasks() -> None:
    simulation = simulation_of(counted("env.episode_limit=null").model, NodeConfig(gpus=1))
    assert simulation is not None and simulation.episode_limit == 50


@pytest.mark.simulator
def test_a_simulator_without_published_rates_is_measured() -> None:
    nodes = (NodeConfig(gpus=8, gpu=H100),)
    asked = replace(recipe(), env=GymnasiumConfig(id="Pendulum-v1", num_envs=16))
    found, _ = profiles_for(asked, Cluster("one", nodes), MemoryModel(asked))
    simulate = found[H100].cost("simulate")
    assert simulate.on == CPU and simulate.of(64) > 0
    assert "measured with a few environments" in found[H100].note
    assert found[H100].episode_limit == 100


def test_a_simulator_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise UserError("it is not installed: pip install it")

    monkeypatch.setattr("rlinf_vla.features.planner.published.measure_simulator", refuse)
    with pytest.raises(UserError, match=r"env=maniskill.*not installed.*give profile=FILE"):
        measured_simulation(counted().model)


def test_a_gpu_without_published_rates() -> None:
    rates, remark = rates_of(NodeConfig(gpus=1, gpu="a-gpu", gpu_memory_gb=45))
    assert rates == DEVICES["nvidia-l40s"], "the most similar memory"
    assert remark is not None and "no rates are published for a-gpu" in remark


def test_the_rates_of_a_device_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a GPU without published rates."""
    monkeypatch.setattr("rlinf_vla.features.planner.rates.SIZES", {"cpu": (64, 1 << 16)})
    node = NodeConfig(gpus=2, gpu="a-gpu", gpu_memory_gb=20, gpu_link_gbps=80)
    rates = measured_rates(torch.device("cpu"), node)
    assert all(value > 0 for value in asdict(rates).values())
    assert (rates.memory, rates.bus) == (20, 10)


def test_each_type_of_device_has_a_profile() -> None:
    nodes = [
        NodeConfig(name="a", gpus=8, gpu=H100, cpus=128),
        NodeConfig(name="b", gpus=2, gpu=L4, cpus=16),
    ]
    found, measured = profiles_for(recipe(), Cluster("two", tuple(nodes)), counted().model)
    assert measured is None and [(name, each.cores) for name, each in found.items()] == [
        (H100, 128),
        (L4, 16),
    ]
    assert found[L4].cost("act").of(64) > 4 * found[H100].cost("act").of(64)
