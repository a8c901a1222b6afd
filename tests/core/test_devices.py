"""Moving tensors between devices, and what the simulated GPU refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.devices import CPU, accelerator, device_of, measured_memory, moved
from rlinf_vla.testing.simulated_gpu import GPU, GpuTensor, captured, simulated_gpu

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.float64]


class Copies(TorchDispatchMode):
    """Counts the copies between devices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.count += isinstance(args[0], GpuTensor) != isinstance(found, GpuTensor)
        return found


def test_tensors_of_all_dtypes_cross_in_one_copy_and_come_back() -> None:
    tensors = {
        str(dtype): (torch.arange(7 * size) % 2).reshape(7, size).to(dtype)
        for size, dtype in enumerate(DTYPES)
    }
    tensors["transposed"] = torch.randn(3, 5).T
    with simulated_gpu(), Copies() as copies:
        there = moved(tensors, GPU)
        back = moved(there, CPU)
    assert copies.count == 2
    assert list(there) == list(back) == list(tensors)
    for name, value in tensors.items():
        assert (
            isinstance(there[name], GpuTensor)
            and there[name].dtype == value.dtype
            and there[name].is_contiguous()
        )
        assert torch.equal(back[name], value)
    storages = {value.untyped_storage().data_ptr() for value in back.values() if value.numel()}
    assert len(storages) == 1
    assert all(
        value.data_ptr() % 64 == next(iter(storages)) % 64
        for value in back.values()
        if value.numel()
    )


def test_what_is_there_already_is_not_copied() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    assert moved(tensors, CPU) is tensors
    with simulated_gpu():
        half = {"a": tensors["a"].to(GPU), "b": tensors["b"]}
        found = moved(half, GPU)
        assert found["a"] is half["a"] and isinstance(found["b"], GpuTensor)


def test_the_device_of_a_network() -> None:
    network = nn.Linear(2, 2)
    assert device_of(network) == CPU
    with simulated_gpu():
        assert device_of(network.to(GPU)) == GPU


def test_the_simulated_gpu_computes_with_values_and_gradients() -> None:
    network, x = nn.Linear(3, 2), torch.randn(4, 3)
    network(x).square().sum().backward()
    expected = network.weight.grad
    network.zero_grad()
    with simulated_gpu():
        network.to(GPU)
        network(x.to(GPU)).square().sum().backward()
        assert expected is not None and network.weight.grad is not None
        assert torch.equal(network.weight.grad.to(CPU), expected)


def test_the_simulated_gpu_refuses_mixed_devices() -> None:
    with simulated_gpu():
        gpu = torch.ones(2, device=GPU)
        cpu = torch.ones(2)
        for mix in (lambda: gpu + cpu, lambda: torch.cat([gpu, cpu]), lambda: cpu[gpu.long()]):
            with pytest.raises((RuntimeError, NotImplementedError)):
                mix()
        assert torch.equal((gpu + torch.tensor(1.0)).to(CPU), torch.full((2,), 2.0)), (
            "a single number may come from the CPU"
        )
        assert torch.equal(gpu[torch.tensor([0, 1])].to(CPU), cpu), "indices are copied"


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[[0, 1]],
        lambda x: x + torch.tensor([1.0, 2.0], device=GPU),
        lambda x: x.to(CPU),
        lambda x: torch.zeros(2).to(GPU) + x,
        lambda x: torch.arange(2) + 1,
    ],
)
def test_what_a_cuda_graph_cannot_record_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with simulated_gpu():
        x = torch.ones(2, device=GPU)
        call(x)
        with captured(), pytest.raises(AssertionError):
            call(x)


def test_an_accelerator_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        raise TypeError(f"{device} has no {dtype}\nmore")

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")
    )
    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(UserError, match=r"device=mps cannot .* \(mps has no torch.float64\): use"):
        accelerator("mps")
    with pytest.raises(UserError, match="no XPU device"):
        accelerator("xpu")


def test_peaks_of_memory_are_those_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"active_bytes.all.peak": 7e9, "reserved_bytes.all.peak": 9e9, "num_alloc_retries": 2}
    forgotten: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: now)
    gpu = torch.device("cuda", 1)
    with measured_memory(gpu) as peaks:
        assert forgotten == [gpu]
        now["active_bytes.all.peak"] = 8e9
    assert peaks == {
        "memory/update_gb": 8.0,
        "memory/reserved_gb": 9.0,
        "memory/allocation_retries": 2.0,
    }
    with measured_memory(CPU) as nothing:
        pass
    assert nothing == {} and forgotten == [gpu]
