"""Processes whose slots step together, in host memory and in memory that stands for a GPU's."""

from __future__ import annotations

import inspect
import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from rlinf_vla.core.devices import CPU
from rlinf_vla.core.images import through_jpeg
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import StepResult
from rlinf_vla.envs import frame_memory
from rlinf_vla.envs.processes import SimulatorPool
from rlinf_vla.envs.vector_env import ProcessVectorEnv
from rlinf_vla.testing.env import (
    EPISODE_LIMIT,
    NUM_ENVS,
    VectorEnvConformance,
    assert_same,
    episodes,
    random_actions,
)
from tests.envs.point_batch import memory_of_a_gpu

PROGRAM = [str(Path(__file__).with_name("point_batch.py"))]


def make_env(
    processes: int = 1, spare: int = 0, device: torch.device | None = None
) -> ProcessVectorEnv:
    """spare: environments of each process's batch beyond its slots."""
    sizes = {"slots": NUM_ENVS, "processes": processes, "episode_limit": EPISODE_LIMIT}
    return ProcessVectorEnv(
        SimulatorPool(PROGRAM, {"spare": spare}, device=device, **sizes), ("walk",)
    )


class TestConformance(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        return [make_env(), make_env(processes=2, spare=1)]


class TestConformanceInMemoryOfAGpu(VectorEnvConformance):
    @classmethod
    def make(cls) -> list[VectorEnv]:
        found: list[VectorEnv] = []
        for _ in range(2):
            with tempfile.NamedTemporaryFile() as file, memory_of_a_gpu(Path(file.name)):
                found.append(make_env(device=CPU))
        return found


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_episodes_of_different_age_are_replayed(ahead: int) -> None:
    """The slots of a lost process started at different times, some only now: each is replayed to its state."""
    env = make_env()
    actions = random_actions(env, 7, seed=0)
    only_first = torch.tensor([True, False, False])

    def play(kill: bool) -> object:
        env.reset(episodes(1, 2, 3))
        if ahead:
            env.step(actions[:, :ahead])
        env.reset(episodes(4, 0, 0), only_first)
        if kill:
            os.kill(env.pool.pids[0], signal.SIGKILL)
        return env.step(actions)

    expected = play(kill=False)
    assert_same(play(kill=True), expected)
    assert env.pool.restarts == 1
    env.close()


def result_of(env: ProcessVectorEnv, kill: bool = False) -> StepResult:
    actions = random_actions(env, 7, seed=0)
    env.add_jpeg(["map"])
    env.reset(episodes(1, 2, 3))
    env.step(actions)
    env.reset_async(episodes(4, 0, 0), torch.tensor([True, False, False]))
    if kill:
        os.kill(env.pool.pids[0], signal.SIGKILL)
    env.reset_wait()
    return env.step(actions)


@pytest.mark.slow
def test_memory_of_a_gpu_outlives_a_process(tmp_path: Path) -> None:
    """It has the frames, and the replacement writes to it, too."""
    host = make_env()
    expected = result_of(host)
    with memory_of_a_gpu(tmp_path / "memory"):
        env = make_env(device=CPU)
        found = result_of(env, kill=True)
    assert env.pool.restarts == 1
    assert_same(found, expected)
    assert torch.equal(
        found.observation.jpeg["map"], through_jpeg(expected.observation.images["map"])
    )
    assert found.observation.state.numpy().tobytes() in (tmp_path / "memory").read_bytes()
    assert not env.pool.arrays.state.any(), "nothing crossed host memory"
    host.close()
    env.close()


@pytest.mark.slow
def test_frames_cross_host_memory_where_a_process_cannot_map_the_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = make_env()
    with memory_of_a_gpu(tmp_path / "memory", refused=True):
        env = make_env(device=CPU)
    assert_same(result_of(env, kill=True), result_of(host))
    assert "CUDA IPC is not possible: no IPC today" in capsys.readouterr().err
    assert not any((tmp_path / "memory").read_bytes())
    host.close()
    env.close()


def test_a_handle_of_a_gpus_memory_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch tells of a tensor arrives at its own counterpart; the receiver has another number for the GPU."""
    told = {
        "tensor_cls": torch.Tensor,
        "tensor_size": (24,),
        "tensor_stride": (1,),
        "tensor_offset": 5,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 3,
        "storage_handle": b"\x00handle\xff",
        "storage_size_bytes": 4096,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"counter",
        "ref_counter_offset": 7,
        "event_handle": b"event",
        "event_sync_required": True,
    }
    signature = inspect.signature(reductions.rebuild_cuda_tensor)
    given = []
    monkeypatch.setattr(frame_memory, "reduce_tensor", lambda memory: (None, tuple(told.values())))
    monkeypatch.setattr(
        frame_memory,
        "rebuild_cuda_tensor",
        lambda *values: given.append(signature.bind(*values).arguments),
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    frame_memory.opened(
        json.loads(json.dumps(frame_memory.exported(torch.zeros(24, dtype=torch.uint8))))
    )
    assert given == [told | {"storage_device": 0}]


def test_several_processes_cannot_share_a_gpus_memory() -> None:
    with pytest.raises(ValueError, match="only one can"):
        make_env(processes=2, device=CPU)


def test_images_also_as_jpeg() -> None:
    env = make_env()
    env.add_jpeg(["map"])
    shown = [env.reset(episodes(1, 2, 3)), env.step(random_actions(env, 4, seed=0)).observation]
    shown.append(env.reset(episodes(4, 5, 6), torch.tensor([True, False, False])))
    for seen in shown:
        assert torch.equal(seen.jpeg["map"], through_jpeg(seen.images["map"]))
    env.add_jpeg([])
    assert env.reset(episodes(1, 2, 3)).jpeg == {}
    env.close()


def test_a_process_reports_its_progress() -> None:
    """One more than the control steps of each slot's episode, also after a replay."""
    env = make_env()
    env.reset(episodes(1, 2, 3))
    env.step(random_actions(env, 2, seed=0))
    env.reset(episodes(4, 0, 0), torch.tensor([True, False, False]))
    assert env.pool.arrays.reached.tolist() == [1, 3, 3]
    os.kill(env.pool.pids[0], signal.SIGKILL)
    env.step(random_actions(env, 1, seed=0))
    assert env.pool.arrays.reached.tolist() == [2, 4, 4]
    env.close()


def test_slots_that_end_at_different_times_are_observed_at_their_ends() -> None:
    """One is truncated two steps into the chunk, the others continue."""
    env = make_env()
    env.reset(episodes(1, 2, 3))
    still = torch.zeros(NUM_ENVS, EPISODE_LIMIT - 2, 2)
    env.step(still)
    start = env.reset(episodes(0, 5, 6), torch.tensor([False, True, True]))
    result = env.step(torch.full((NUM_ENVS, 4, 2), 0.1))
    assert result.valid.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
    moved = (result.observation.state - start.state)[:, 0]
    assert torch.allclose(moved, torch.tensor([0.06, 0.12, 0.12]), atol=1e-6)
    env.close()
