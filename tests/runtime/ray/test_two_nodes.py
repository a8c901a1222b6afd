"""Two Ray nodes with a network between them that can be cut. ``make cluster-test``."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.ray.counting import in_process, iterate, trained
from tests.runtime.ray.namespaces import FAR, NEAR, Nodes
from tests.runtime.ray.two_nodes import QUICK, RECIPE, digest

pytestmark = pytest.mark.nightly

ITERATIONS = 3


def events(driver: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def run(nodes: Nodes, iterations: int, resource: str, cpus: float = 0.0) -> subprocess.Popen[str]:
    command = (
        sys.executable,
        "-m",
        "tests.runtime.ray.two_nodes",
        nodes.address,
        str(iterations),
        resource,
        str(cpus),
    )
    return nodes.inside(
        "rlinf_near",
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def expected(iterations: int) -> str:
    flow = in_process(RECIPE)
    iterate(flow, RECIPE, iterations)
    return digest(trained(flow))


@pytest.mark.timeout(600)
def test_rollouts_on_another_node(nodes: Nodes) -> None:
    driver = run(nodes, ITERATIONS, "far")
    found = list(events(driver))
    assert driver.wait(timeout=60) == 0, driver.stderr.read() if driver.stderr else ""
    assert {
        (*each["nodes"], each["received"], each["missed"])
        for each in found
        if each["kind"] == "iteration"
    } == {(FAR, 2, 0)}
    assert found[-1] == {"kind": "weights", "digest": expected(ITERATIONS)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("resource", ["", "far"], ids=["room elsewhere", "nowhere else to go"])
def test_a_cut_link(nodes: Nodes, resource: str) -> None:
    """The run continues if possible; if only the lost node could do the work, it ends in time and names the missing worker."""
    iterations = 40
    driver = run(nodes, iterations, resource)
    seen = []
    cut = 0.0
    for event in events(driver):
        seen.append(event)
        if event["kind"] == "iteration" and event["number"] == 2:
            nodes.cut()
            cut = time.monotonic()
    code = driver.wait(timeout=60)
    seconds = time.monotonic() - cut
    complaint = driver.stderr.read() if driver.stderr else ""
    assert cut, complaint
    if not resource:
        played_by = [each["nodes"] for each in seen if each["kind"] == "iteration"]
        assert FAR in played_by[0] and played_by[-1] == [NEAR]
    lost = [each["text"] for each in seen if each["kind"] == "said" and "replaced" in each["text"]]
    assert lost, complaint
    if resource:
        assert (
            code == 1 and "did not start within 90 s: the cluster has no room for it" in complaint
        )
        assert seconds < QUICK.start_timeout_s + 90
    else:
        assert code == 0, complaint
        assert seen[-1] == {"kind": "weights", "digest": expected(iterations)}
        assert max(each["seconds"] for each in seen if each["kind"] == "iteration") < 120


NODE_EVENTS = int(os.environ.get("CHAOS_EVENTS", "30")) // 10


@pytest.mark.timeout(3600)
def test_a_machine_that_comes_and_goes(nodes: Nodes) -> None:
    """It is told to leave, killed or cut off, and joins again, while workers are killed: the weights stay those of a quiet run."""
    # each machine has room for one rollout worker
    driver = run(nodes, 0, "", 1.0)
    chance = random.Random(2)
    seen = []
    happened = Counter[str]()

    def until(wanted: list[str]) -> dict[str, Any]:
        """Read events until rollout workers are on the ``wanted`` machines, and no others."""
        for event in stream:
            seen.append(event)
            if event["kind"] == "iteration" and event["nodes"] == wanted:
                return event
        raise AssertionError(driver.stderr.read() if driver.stderr else seen[-5:])

    stream = events(driver)
    latest = until([NEAR, FAR])
    for number in range(max(3, NODE_EVENTS)):
        kind = ("notice", "cut", "kill")[number % 3]
        if kind == "notice":
            nodes.tell_to_leave(latest["ids"][FAR])
        elif kind == "cut":
            nodes.cut()
        if kind != "kill":
            until([NEAR])
        nodes.kill("rlinf_far")
        nodes.fix()
        until([NEAR])
        nodes.start_far()
        happened.update([kind, "join"])
        latest = until([NEAR, FAR])
        for _ in range(chance.randrange(3)):
            os.kill(chance.choice(latest["pids"]), signal.SIGKILL)
            happened.update(["worker killed"])
            latest = until([NEAR, FAR])
    assert driver.stdin is not None
    driver.stdin.close()
    seen += stream
    assert driver.wait(timeout=60) == 0, driver.stderr.read() if driver.stderr else ""
    print(dict(happened))
    iterations = sum(each["kind"] == "iteration" for each in seen)
    assert seen[-1] == {"kind": "weights", "digest": expected(iterations)}
