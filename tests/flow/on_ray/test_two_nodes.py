"""Two Ray nodes with a network between them that can be cut: two network namespaces. ``make cluster-test``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.flow.on_ray.counting import in_process, iterate, trained
from tests.flow.on_ray.two_nodes import QUICK, RECIPE, digest

ROOT = Path(__file__).parents[3]
NEAR, FAR = "10.77.0.1", "10.77.0.2"
ITERATIONS = 3
ENVIRONMENT = os.environ | {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    # a node counts as gone after 3 seconds without an answer, not after a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


def inside(namespace: str, *command: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(["ip", "netns", "exec", namespace, *command], env=ENVIRONMENT, cwd=ROOT, text=True, **options)


def ray(namespace: str, log: Path, *arguments: str) -> None:
    with log.open("w") as file:  # daemons would keep a pipe open
        command = [str(Path(sys.executable).with_name("ray")), *arguments]
        assert inside(namespace, *command, stdout=file, stderr=subprocess.STDOUT).wait(timeout=120) == 0, log.read_text()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of two nodes. Skips where namespaces may not be made."""
    if "RLINF_VLA_CLUSTER_TEST" not in os.environ:
        pytest.skip("takes minutes and root's rights: make cluster-test")
    try:
        for name in ("rlinf_near", "rlinf_far"):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("link", "add", "rlinf0", "netns", "rlinf_near", "type", "veth", "peer", "name", "rlinf1", "netns", "rlinf_far")
        for name, device, address in (("rlinf_near", "rlinf0", NEAR), ("rlinf_far", "rlinf1", FAR)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        common = ("--num-cpus=2", "--disable-usage-stats", "--object-store-memory=200000000")
        head = ("start", "--head", f"--node-ip-address={NEAR}", "--port=6379", "--include-dashboard=false", '--resources={"near": 8}')
        ray("rlinf_near", tmp_path / "head.log", *head, *common)
        ray(
            "rlinf_far",
            tmp_path / "far.log",
            *("start", f"--address={NEAR}:6379", f"--node-ip-address={FAR}", '--resources={"far": 8}', "--labels=market-type=spot"),
            *common,
        )
        yield f"{NEAR}:6379"
    finally:
        for name in ("rlinf_near", "rlinf_far"):
            found = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True, timeout=30)
            for pid in map(int, found.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)


def events(driver: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def run(address: str, iterations: int, resource: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "tests.flow.on_ray.two_nodes", address, str(iterations), resource)
    return inside("rlinf_near", *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def expected(iterations: int) -> str:
    flow = in_process(RECIPE)
    iterate(flow, RECIPE, iterations)
    return digest(trained(flow))


@pytest.mark.timeout(600)
def test_rollouts_on_another_node(nodes: str) -> None:
    driver = run(nodes, ITERATIONS, "far")
    found = list(events(driver))
    assert driver.wait(timeout=60) == 0, driver.stderr.read() if driver.stderr else ""
    assert {tuple(each["nodes"]) for each in found if each["kind"] == "iteration"} == {(FAR,)}
    assert found[-1] == {"kind": "weights", "digest": expected(ITERATIONS)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("resource", ["", "far"], ids=["room elsewhere", "nowhere else to go"])
def test_a_cut_link(nodes: str, resource: str) -> None:
    """The run goes on where it can; where only the lost node could do the work, it ends in time with what it waited for."""
    iterations = 40
    driver = run(nodes, iterations, resource)
    seen, cut = [], 0.0
    for event in events(driver):
        seen.append(event)
        if event["kind"] == "iteration" and event["number"] == 2:
            ip("-n", "rlinf_far", "link", "set", "rlinf1", "down")
            cut = time.monotonic()
    code = driver.wait(timeout=60)
    seconds, complaint = time.monotonic() - cut, driver.stderr.read() if driver.stderr else ""
    assert cut, complaint
    if not resource:
        played_by = [each["nodes"] for each in seen if each["kind"] == "iteration"]
        assert FAR in played_by[0] and played_by[-1] == [NEAR]
    lost = [each["text"] for each in seen if each["kind"] == "said" and "replaced" in each["text"]]
    assert lost, complaint
    if resource:
        assert code == 1 and "did not start within 90 s: the cluster has no room for it" in complaint
        assert seconds < QUICK.start + 90
    else:
        assert code == 0, complaint
        assert seen[-1] == {"kind": "weights", "digest": expected(iterations)}
        assert max(each["seconds"] for each in seen if each["kind"] == "iteration") < 120
