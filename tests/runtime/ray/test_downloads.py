"""What workers load from the Hub is downloaded once per machine, before they start: two Ray nodes, and a server that acts as the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.runtime import recipes
from tests.hub_server import Hub, serving
from tests.runtime.ray.namespaces import ENVIRONMENT, ROOT

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}
RUN = """
import json, sys
from ray.cluster_utils import Cluster
from rlinf_vla.config.errors import UserError
from rlinf_vla.runtime.ray.cluster import connect_cluster
from rlinf_vla.runtime.ray.downloads import download_on_machines
from rlinf_vla.runtime.ray.places import Role, reserve_places
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"train": 1}, "include_dashboard": False})
cluster.add_node(num_cpus=1, resources={"roll": 3})
cluster.add_node(num_cpus=1, resources={"reward": 1})
roles = {
    "trainer": Role(count=1, cpus=0.1, resources={"train": 1.0}),
    "rollout": Role(count=3, cpus=0.1, resources={"roll": 1.0}),
    "reward": Role(count=1, cpus=0.1, resources={"reward": 1.0}),
    "feature": Role(count=0),
}
said, error = [], None
with connect_cluster(cluster.address, roles, lambda line: None), reserve_places(roles, 60.0) as places:
    try:
        download_on_machines(sys.argv[1:], places, 60.0, said.append)
    except UserError as refusal:
        error = str(refusal)
cluster.shutdown()
print(json.dumps([said, error]))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving(monkeypatch, str(tmp_path)) as found:
        found.holds("models", "org/policy", FILES)
        yield found


def run(hub: Hub, folder: Path, *locations: str) -> tuple[list[str], str | None]:
    ours = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, *locations],
        env=os.environ | ENVIRONMENT | ours,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    said, error = json.loads(done.stdout.splitlines()[-1])
    return said, error


@pytest.mark.parametrize(
    ("words", "locations"),
    [
        ((), []),
        (("model.checkpoint=hf://org/policy",), ["hf://org/policy"]),
        (
            ("model.checkpoint=hf://org/policy@v1", "model.lora.adapter=hf://org/adapter"),
            ["hf://org/policy@v1", "hf://org/adapter"],
        ),
        (("model.lora.adapter=hf://org/adapter",), ["hf://org/adapter"]),
    ],
)
def test_a_recipe_names_what_its_workers_load(words: tuple[str, ...], locations: list[str]) -> None:
    recipe = recipes.read(compose.load("train", ["recipe=maniskill_ppo", *words]))
    assert recipes.hub_locations(recipe) == locations


@pytest.mark.slow
def test_each_machine_whose_workers_load_weights_downloads_them_once(
    hub: Hub, tmp_path: Path
) -> None:
    said, error = run(hub, tmp_path, "hf://org/policy")
    assert error is None
    first, *others = said
    address, other = first.partition(" to ")[2].removesuffix(", unless it is there").split(", ")
    assert first.startswith("downloading hf://org/policy to ")
    assert sorted(line.partition(":")[0] for line in others) == sorted([address, other])
    assert all("downloaded after" in line for line in others)
    asked = hub.requests.count("GET /api/models/org/policy/revision/main")
    assert asked == 2, "for the nodes of the trainer and of the three rollout workers"
    assert {path.name for path in (tmp_path / "hub").rglob("snapshots/*/*")} == {*FILES}


@pytest.mark.nightly
def test_a_download_that_is_impossible_names_the_machine(hub: Hub, tmp_path: Path) -> None:
    said, error = run(hub, tmp_path, "hf://org/nothing")
    assert len(said) <= 2 and error is not None and "\n" not in error
    address, _, rest = error.partition(": ")
    assert address in said[0] and rest.startswith("hf://org/nothing: ") and "no such" in rest
