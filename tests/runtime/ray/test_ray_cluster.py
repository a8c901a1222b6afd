"""Missing and too small clusters are reported in one line before any heavy work starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlinf_vla.config.cluster import ClusterConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.ranges import check_values
from rlinf_vla.runtime.ray import cluster as ray_cluster
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.places import Role, require_room
from rlinf_vla.runtime.ray.pool import raised_there

ALIVE = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}, "Labels": {"market-type": "spot"}}
GONE = {"Alive": False, "Resources": {"CPU": 100.0}, "Labels": {}}


@pytest.fixture
def silent_port() -> Iterator[int]:
    """One on which nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize("address", ["head", "head:port", "ray://head:10001", "-inf"])
def test_an_invalid_address(address: str) -> None:
    with pytest.raises(
        UserError, match=f"address={address} cannot be used: use HOST:PORT of the cluster's head"
    ):
        check_values(ClusterConfig(name="laptop", address=address))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "127.0.0.1:{port}",
            "nothing answers there (Connection refused); is `ray start --head` running?",
        ),
        ("no.such.host.invalid:6379", "nothing answers there"),
    ],
)
def test_an_address_without_a_cluster(address: str, message: str, silent_port: int) -> None:
    with (
        pytest.raises(UserError) as error,
        connect_cluster(address.format(port=silent_port), {}, print),
    ):
        pass
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            {"trainer": Role(count=3, gpus=1.0)},
            "the cluster has 2 GPU, the plan wants 3 (3 trainer): lower cluster.*_workers",
        ),
        (
            {"trainer": Role(count=1), "rollout": Role(count=8)},
            "the cluster has 8 CPU, the plan wants 9 (1 trainer, 8 rollout)",
        ),
        (
            {"robot": Role(count=1, resources={"robot": 1.0})},
            "the cluster has 0 robot, the plan wants 1 (1 robot): on the machine that has it, "
            "ray start --address=HOST:PORT --resources='{\"robot\": 1}'",
        ),
        (
            {"rollout": Role(count=1, labels={"market-type": "on-demand"})},
            "no node of the cluster can run a rollout worker",
        ),
    ],
)
def test_a_cluster_without_enough_resources(roles: dict[str, Role], message: str) -> None:
    with pytest.raises(UserError) as error:
        require_room([ALIVE, GONE], roles)
    assert message in str(error.value)


def test_a_cluster_with_enough_resources() -> None:
    roles = {
        "trainer": Role(count=2, gpus=1.0),
        "rollout": Role(count=4, labels={"market-type": "spot"}),
        "reward": Role(count=0, gpus=9.0),
    }
    require_room([ALIVE, GONE], roles)


def test_a_users_mistake_on_a_worker_is_one_line_and_a_bug_has_its_traceback() -> None:
    from ray.exceptions import RayTaskError

    mistake, defect = (
        RayTaskError("ready", "Traceback ...\nwhere it was", cause)
        for cause in (UserError("no such task"), KeyError("x"))
    )
    assert str(raised_there(mistake)) == "no such task"
    found = raised_there(defect.as_instanceof_cause())  # as ray.get raises it
    assert isinstance(found, KeyError) and "where it was" in found.__notes__[0]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "Version mismatch: The cluster was started with:\n Ray: 2.40.0",
            "that cluster runs another version of Ray or Python",
        ),
        ("AuthenticationError: invalid token", "set RAY_AUTH_MODE and RAY_AUTH_TOKEN"),
    ],
)
def test_an_error_of_ray_is_one_line(said: str, message: str) -> None:
    told = ray_cluster.explain(RuntimeError(said))
    assert message in told and "\n" not in told


STRANGER = """
import sys
import ray._raylet
try:
    ray._raylet.GcsClient(address=sys.argv[1])
except Exception as error:
    print(type(error).__name__)
else:
    print("let in")
"""
OWN_CLUSTER = """
import os, subprocess, sys
from rlinf_vla.runtime.ray.cluster import connect_cluster
with connect_cluster(None, {}, lambda text: None):
    import ray
    address = ray.get_runtime_context().gcs_address
    for token in (None, "0" * 64, os.environ["RAY_AUTH_TOKEN"]):
        known = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | known
        subprocess.run([sys.executable, "-c", sys.argv[1], address], env=environment, check=True)
"""


@pytest.mark.slow
def test_a_local_cluster_requires_its_token() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")
    }
    done = subprocess.run(
        [sys.executable, "-c", OWN_CLUSTER, STRANGER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout.split() == ["AuthenticationError", "AuthenticationError", "let", "in"], (
        done.stdout + done.stderr
    )


OTHERS_CLUSTER = """
import os
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
from rlinf_vla.runtime.ray.cluster import connect_cluster
os.environ |= {"NCCL_SOCKET_IFNAME": "eth7", "TORCH_NCCL_BLOCKING_WAIT": "0", "GLOO_SOCKET_IFNAME": "eth8", "UNRELATED": "x"}
with connect_cluster(cluster.address, {}, print):
    import ray
    names = ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "GLOO_SOCKET_IFNAME", "UNRELATED")
    print(*ray.get(ray.remote(lambda: [os.environ.get(name) for name in names]).remote()))
cluster.shutdown()
"""


@pytest.mark.nightly
def test_the_network_variables_of_this_process_reach_the_workers_of_a_cluster_that_was_there() -> (
    None
):
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_AUTH", *ray_cluster.NETWORK))
    }
    done = subprocess.run(
        [sys.executable, "-c", OTHERS_CLUSTER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["eth7 0 eth8 None"], done.stdout + done.stderr
    assert (
        "the cluster's workers get GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, TORCH_NCCL_BLOCKING_WAIT of this process"
        in lines
    )
