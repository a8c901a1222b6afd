"""What a rollout worker's simulators are given, of what a recipe has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.devices import own_cores, share_cores
from rlinf_vla.envs.options import processes_per_group
from rlinf_vla.runtime import builders, recipes


class Started(Exception):
    """An environment plug-in was asked for its simulators."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: the configuration that one of a number of shards gives to ManiSkill."""

    def create(config: Any, groups: int) -> Any:
        raise Started(config)

    plugin = plugins.envs()["maniskill"]
    monkeypatch.setattr(plugin, "create", create)
    monkeypatch.setattr("rlinf_vla.envs.batched.why_not_on_gpu", lambda: None)
    monkeypatch.setattr("rlinf_vla.envs.batched.current_gpu", lambda: (None, {}))
    monkeypatch.setattr("rlinf_vla.envs.maniskill.vulkan.sees_gpu", lambda variables: True)

    def config(recipe: Recipe, shards: int) -> Any:
        with (
            pytest.raises(Started) as started,
            builders.recipe_builders(recipe, shards).environments(),
        ):
            pass
        return started.value.args[0]

    return config


def recipe(workers: int, **env: Any) -> Recipe:
    whole = recipes.read(compose.load("train", ["recipe=maniskill_ppo", "cluster=laptop"]))
    return replace(
        whole,
        env=replace(whole.env, **env),
        cluster=replace(whole.cluster, runtime="ray", rollout_workers=workers),
        rollout=replace(whole.rollout, pipeline_depth=2),
    )


@pytest.mark.parametrize(("environments", "backend"), [(64, "gpu"), (32, "cpu")])
def test_the_number_of_workers_does_not_move_a_simulation(
    given: Any, environments: int, backend: str
) -> None:
    for workers in (1, 8):
        config = given(recipe(workers, num_envs=environments), workers)
        assert (config.num_envs, config.backend) == (environments // workers, backend)


@pytest.mark.parametrize(
    ("processes", "workers", "own"), [(None, 4, None), (16, 4, 4), (20, 4, 4), (2, 4, 2)]
)
def test_workers_divide_the_processes(
    given: Any, processes: int | None, workers: int, own: int | None
) -> None:
    """Each of the two environment groups of a worker has at least one."""
    config = given(recipe(workers, num_envs=64, backend="cpu", processes=processes), workers)
    assert config.processes == own


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    yield
    share_cores(1)


@pytest.mark.usefixtures("cores")
def test_workers_of_a_machine_divide_its_cores() -> None:
    config = recipe(1, num_envs=64, backend="cpu").env
    assert processes_per_group(config, 2, batches=False) == 8
    share_cores(4)
    assert processes_per_group(config, 2, batches=False) == 2
    share_cores(32)
    assert own_cores() == 1
