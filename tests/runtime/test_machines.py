from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlinf_vla.config.cluster import THIS, ClusterConfig, NodeConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.runtime import machines

ASSUMED = ClusterConfig(
    name="8gpu",
    device="cuda",
    nodes=[NodeConfig(gpus=8, gpu="h100", gpu_memory_gb=80, cpus=128, memory_gb=1000)],
)


def described(nodes: list[NodeConfig], gpu: bool) -> machines.Cluster:
    return machines.describe(
        ClusterConfig(name="mine", nodes=nodes, device="cuda" if gpu else "cpu")
    )


def test_without_nodes_the_cluster_is_this_machine() -> None:
    found = described([], gpu=False)
    (node,) = found.nodes
    assert (
        (node.name, node.gpus, node.device) == (THIS, 0, "cpu")
        and node.cpus >= 1
        and node.memory > 1e8
    )
    assert found.devices == found.machines == 1 and found.price_per_hour is None


def test_totals_of_a_cluster() -> None:
    nodes = [
        NodeConfig("big", 2, 8, "fast", price_per_hour=20.0),
        NodeConfig("cheap", 3, 4, "slow", spot=True, price_per_hour=1.0),
    ]
    found = described(nodes, gpu=True)
    assert (found.devices, found.machines, found.price_per_hour) == (28, 5, 43.0)
    assert [node.device for node in found.nodes] == ["fast", "slow"]
    assert str(found).startswith("2 x big (8 x fast of 80 GB") and "spot" in str(found)
    assert described([*nodes, NodeConfig("free", gpus=1)], gpu=True).price_per_hour is None


def test_spot_nodes_come_last_and_nodes_without_gpus_are_excluded_on_gpus() -> None:
    nodes = [NodeConfig("spot", gpus=1, spot=True), NodeConfig("plain"), NodeConfig("kept", gpus=1)]
    assert [node.name for node in described(nodes, gpu=True).nodes] == ["kept", "spot"]
    assert [node.name for node in described(nodes, gpu=False).nodes] == ["plain", "kept", "spot"]


@pytest.mark.parametrize(
    ("node", "word"),
    [
        ({"count": 0}, "count=0 is out of range"),
        ({"gpus": -1}, "gpus=-1"),
        ({"cpus": 0}, "cpus=0"),
        ({"network_gbps": 0.0}, "network_gbps=0.0"),
        ({"memory_gb": float("nan")}, "memory_gb=nan"),
        ({"latency_ms": -1.0}, "latency_ms=-1.0"),
        ({"price_per_hour": -1.0}, "price_per_hour=-1.0"),
        ({"spot": True}, "on-demand"),
    ],
)
def test_an_invalid_node(node: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        odd = NodeConfig("odd", **node)  # type: ignore[arg-type]
        check_values(odd)
        described([odd], gpu=False)


@pytest.mark.parametrize(
    ("keys", "broadcasts"),
    [
        ({}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda", "offload": True}, False),
        ({"device": "cuda", "weights": "store"}, False),
        ({"device": "fake_gpu"}, False),
        ({"device": "npu"}, False),
        ({"weights": "broadcast"}, True),
    ],
)
def test_weights_are_broadcast_on_gpus_that_have_the_memory_or_on_request(
    keys: dict[str, Any], broadcasts: bool
) -> None:
    assert machines.broadcasts(ClusterConfig("some", **keys)) == broadcasts


def test_an_invalid_cluster() -> None:
    with pytest.raises(UserError, match=r"two of cluster\.nodes have the same name"):
        described([NodeConfig("a"), NodeConfig("a")], gpu=False)
    with pytest.raises(UserError, match="needs GPUs"):
        described([NodeConfig("a")], gpu=True)


@pytest.mark.parametrize(
    ("actual", "said"),
    [
        (NodeConfig(gpus=8, gpu="h100", gpu_memory_gb=79.6, cpus=128, memory_gb=980), []),
        (
            NodeConfig(gpus=8, gpu="a100", gpu_memory_gb=80, cpus=128, memory_gb=1000),
            ["assumes GPUs of type h100, this machine's are a100"],
        ),
        (
            NodeConfig(gpus=8, gpu="h100", gpu_memory_gb=80, cpus=32, memory_gb=250),
            ["assumes 128 cores, this machine has 32", "assumes 1000 GB of main memory"],
        ),
    ],
)
def test_a_machine_is_compared_with_its_description(
    monkeypatch: pytest.MonkeyPatch, actual: NodeConfig, said: list[str]
) -> None:
    monkeypatch.setattr(machines, "this_machine", lambda device: actual)
    lines = machines.compare_with_assumed(ASSUMED)
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_a_gpu_with_less_memory_than_assumed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = NodeConfig(gpus=8, gpu="a100", gpu_memory_gb=42.4, cpus=128, memory_gb=1000)
    monkeypatch.setattr(machines, "this_machine", lambda device: actual)
    with pytest.raises(UserError, match=r"assumes GPUs of 80 GB, this machine's have 42\.4 GB"):
        machines.compare_with_assumed(ASSUMED)
    elsewhere = replace(ASSUMED, address="10.0.0.1:6379")
    assert machines.compare_with_assumed(elsewhere) == []
    assert machines.compare_with_assumed(replace(ASSUMED, nodes=[])) == []
