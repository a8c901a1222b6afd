"""Trainer ranks that do not meet end in one line, over gloo and without Ray."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.ray.process_group import join

HOST = "127.0.0.1"
CLUSTER = ClusterConfig("toy", start_timeout_s=0.2, call_timeout_s=0.2)
FIX = "set GLOO_SOCKET_IFNAME in this shell to the network interface that connects them"


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        yield int(taken.getsockname()[1])


def test_ranks_that_never_come_are_named(store: dist.TCPStore) -> None:
    store.set("here/2", "10.0.0.3")
    with pytest.raises(UserError) as caught:
        join((HOST, store.port), 0, 4, "10.0.0.1", CLUSTER, store)
    line = str(caught.value)
    assert (
        f"ranks 1, 3 of 4 did not come to {HOST}:{store.port} within 0.2 s (cluster.start_timeout_s)"
        in line
    )
    assert FIX in line and "\n" not in line and not dist.is_initialized()


def test_a_rank_that_does_not_reach_the_first_says_so(silent_port: int) -> None:
    with pytest.raises(UserError) as caught:
        join((HOST, silent_port), 1, 2, "10.0.0.2", CLUSTER)
    line = str(caught.value)
    assert f"rank 1 at 10.0.0.2 did not reach rank 0 at {HOST}:{silent_port} within 0.2 s" in line
    assert FIX in line and "\n" not in line


def test_ranks_that_met_and_do_not_connect_are_named_with_their_addresses(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    store.set("here/1", "10.0.0.2")
    with pytest.raises(UserError) as caught:
        join((HOST, store.port), 0, 2, "10.0.0.1", CLUSTER, store)
    line = str(caught.value)
    assert "rank 0 at 10.0.0.1, rank 1 at 10.0.0.2 do not connect over gloo (" in line
    assert FIX in line and "\n" not in line


def test_the_variable_is_that_of_the_backend(silent_port: int) -> None:
    with pytest.raises(UserError, match="set NCCL_SOCKET_IFNAME"):
        join((HOST, silent_port), 1, 2, "10.0.0.2", replace(CLUSTER, device="cuda"))
