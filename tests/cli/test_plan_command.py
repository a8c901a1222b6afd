"""``rlinf-vla plan`` as a user runs it, in counter world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.cli import compose
from rlinf_vla.features.planner import profiles as command
from rlinf_vla.features.planner import search
from rlinf_vla.features.planner.plan import Plan
from rlinf_vla.features.planner.profile import Profile, read_profile
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.machines import this_machine
from tests.cli.conftest import CommandLine, Counting
from tests.features.planner.made_up import on_gpu, profile

COUNTED = {"chunk": 2, "episode_limit": 6}
"""What the profile of counter world must contain."""


@pytest.fixture
def known(tmp_path: Path) -> str:
    """A file with an artificial profile of this type of machine."""
    profile(**COUNTED).write(tmp_path / "known.json")
    return f"profile={tmp_path / 'known.json'}"


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*arguments: Any) -> Profile:
        pytest.fail("something is measured")

    monkeypatch.setattr(command, "measure_profile", measure)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_plan_is_measured_chosen_and_written(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    found = rlinf_vla(*counting.arguments("plan", "counting_ppo", "run_dir=plan"))
    assert found.code == 0, found.err
    for part in (
        "macro flow of ppo",
        "cluster laptop: 1 x this machine",
        "measured on a CPU",
        "chosen: ",
        "predicted: ",
        "a act",
        "its keys: ",
    ):
        assert part in found.out
    document = read(tmp_path / "plan" / "plan.json")
    assert str(Plan(**document["chosen"]["plan"])) in found.out and not document["assumed"]
    assert document["chosen"]["seconds"] > 0 and len(document["plans"]) > 1
    assert read(tmp_path / "plan" / "plan_trace.json")["traceEvents"]
    measured = read_profile(tmp_path / "plan" / "profile.json")
    assert (measured.device, measured.cores, measured.chunk, measured.episode_limit) == (
        "cpu",
        this_machine().cpus,
        2,
        6,
    )
    assert (
        measured.inline
        and len(measured.episodes) == 4
        and all(calls <= 3 for calls, _ in measured.episodes)
    )
    for name in (
        "act",
        "value",
        "merge",
        "simulate",
        "reset",
        "update",
        "optimise",
        "publish",
        "reference",
    ):
        assert measured.cost(name).of(8) > 0, name
    assert (
        measured.bytes.weights > measured.bytes.trained > 0
        and measured.bytes.call > measured.bytes.inputs > 0
    )
    assert "reward" not in measured.operations and all(
        env.closed for env in counting.plugin.created
    )


def test_a_profile_is_reused(
    rlinf_vla: CommandLine, counting: Counting, known: str, unmeasured: None, tmp_path: Path
) -> None:
    outputs = []
    for name in ("one", "two"):
        found = rlinf_vla(
            *counting.arguments("plan", "counting_ppo", known, f"run_dir={name}", "--json")
        )
        assert found.code == 0, found.err
        assert (
            json.loads(found.out) == read(tmp_path / name / "plan.json") and "chosen: " in found.err
        )
        outputs.append(
            {
                key: value
                for key, value in read(tmp_path / name / "plan.json").items()
                if key != "environment"
            }
        )
    assert outputs[0] == outputs[1] and not (tmp_path / "one" / "profile.json").exists()


def test_a_users_reward_is_measured_too(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    found = rlinf_vla(
        *counting.arguments("plan", "counting_grpo", "reward=success", "run_dir=plan")
    )
    assert found.code == 0, found.err
    assert "reward" in read_profile(tmp_path / "plan" / "profile.json").operations
    assert any(
        each["plan"]["reward_workers"] for each in read(tmp_path / "plan" / "plan.json")["plans"]
    )


@pytest.mark.parametrize("name", ["counting_sac", "counting_classifier"])
def test_an_algorithm_with_only_one_plan(
    rlinf_vla: CommandLine, counting: Counting, unmeasured: None, name: str, tmp_path: Path
) -> None:
    found = rlinf_vla(*counting.arguments("plan", name))
    assert found.code == 0 and "macro flow of" in found.out and "nothing to choose" in found.out
    assert not (tmp_path / "runs").exists()


def test_grpo(rlinf_vla: CommandLine, counting: Counting, known: str, unmeasured: None) -> None:
    found = rlinf_vla(
        *counting.arguments(
            "plan", "counting_grpo", known, "algorithm.kl_coef=0.1", "algorithm.groups_per_step=1"
        )
    )
    assert found.code == 0 and "~> reference" in found.out and "~> update" in found.out, found.err


# plan files


def test_a_plan_in_a_file_is_the_run(
    rlinf_vla: CommandLine, counting: Counting, known: str, unmeasured: None, tmp_path: Path
) -> None:
    more = ("env.num_envs=8", "rollout.batch_size=2", "run_dir=plan", "output=plan.yaml")
    found = rlinf_vla(*counting.arguments("plan", "counting_ppo", known, *more))
    assert found.code == 0 and "to run it: rlinf-vla train plan=plan.yaml" in found.out, found.err
    chosen = read(tmp_path / "plan" / "plan.json")["chosen"]["plan"]
    recipe = recipes.read(compose.load("train", ["plan=plan.yaml", "iterations=1"]))
    assert (
        search.plan_of(recipe) == Plan(**chosen)
        and recipe.cluster.plan == "given"
        and recipe.output is None
    )
    assert (recipe.name, recipe.env.num_envs, recipe.rollout.batch_size, recipe.iterations) == (
        "counting_ppo",
        8,
        2,
        1,
    )
    again = rlinf_vla(*counting.arguments("plan", "counting_ppo", known, *more))
    assert "output=plan.yaml exists already" in again.complaint


def test_what_a_plan_file_may_not_say(
    rlinf_vla: CommandLine, counting: Counting, known: str, unmeasured: None, tmp_path: Path
) -> None:
    assert "plan=none.yaml: no such file" in rlinf_vla("train", "plan=none.yaml").complaint
    (tmp_path / "odd.yaml").write_text("a: [1\n")
    assert "odd.yaml cannot be read" in rlinf_vla("train", "plan=odd.yaml").complaint
    assert (
        rlinf_vla(
            *counting.arguments("plan", "counting_ppo", known, "run_dir=plan", "output=plan.yaml")
        ).code
        == 0
    )
    for other in ("recipe=maniskill_ppo", "run=plan", "algorithm=grpo"):
        assert "plan=plan.yaml" in rlinf_vla("train", "plan=plan.yaml", other).complaint
    path = tmp_path / "plan.yaml"
    path.write_text(path.read_text().replace("address: null", "address: 10.0.0.1:6379"))
    assert "a file must not choose programs" in rlinf_vla("train", "plan=plan.yaml").complaint


# clusters


def cluster_file(counting: Counting, text: str) -> str:
    """A user's cluster file, next to the recipe."""
    folder = counting.folder / "cluster"
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(
        f"defaults: [schema, _self_]\nname: mine\ndevice: cuda\n{text}"
    )
    return "cluster=mine"


TWO = """nodes:
  - {name: big, count: 2, gpus: 2, gpu: fast, cpus: 32, price_per_hour: 3.0}
  - {name: cheap, count: 2, gpus: 2, gpu: slow, cpus: 32, spot: true, price_per_hour: 0.5}
"""


def test_a_users_cluster(
    rlinf_vla: CommandLine, counting: Counting, unmeasured: None, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("fast.json", "slow.json")]
    for path, factor in zip(files, (10, 5), strict=True):
        on_gpu(path.stem, factor, **COUNTED).write(path)
    given = f"profile=[{files[0]},{files[1]}]"
    more = ("env.num_envs=32", "rollout.batch_size=2", "run_dir=plan")
    found = rlinf_vla(
        *counting.arguments("plan", "counting_ppo", cluster_file(counting, TWO), given, *more)
    )
    assert found.code == 0, found.err
    assert "2 x big" in found.out and "spot" in found.out and "per iteration" in found.out
    document = read(tmp_path / "plan" / "plan.json")
    assert document["chosen"]["price"] == pytest.approx(7.0 * document["chosen"]["seconds"] / 3600)
    assert any("spot machine" in each["reason"] for each in document["refused"])


def test_a_device_without_a_profile(
    rlinf_vla: CommandLine, counting: Counting, unmeasured: None, tmp_path: Path
) -> None:
    """A simulator without published rates is measured, and a GPU without takes those of another."""
    mine = cluster_file(counting, "nodes:\n  - {name: big, gpus: 2, gpu: fast, memory_gb: 99}\n")
    result = rlinf_vla(*counting.arguments("plan", "counting_ppo", mine, "run_dir=plan"))
    assert result.code == 0, result.err
    (profile,) = read(tmp_path / "plan" / "plan.json")["profiles"].values()
    assert "counter measured with a few environments on this machine's CPU" in profile["note"]
    assert "no rates are published for fast: those of nvidia-h100" in profile["note"]


def test_plan_predicts_without_a_gpu_or_a_measurement(
    rlinf_vla: CommandLine, tmp_path: Path
) -> None:
    found = rlinf_vla(
        "plan",
        "recipe=maniskill_ppo",
        "cluster=8gpu",
        "env.backend=gpu",
        f"run_dir={tmp_path / 'plan'}",
    )
    assert found.code == 0, found.err
    assert (
        found.out.count("PREDICTED from published numbers") == 2
        and "its keys: " in found.out
        and "memory per device" in found.out
    )
    document = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert (
        document["assumed"]
        and document["chosen"]["seconds"] > 0
        and not (tmp_path / "plan" / "profile.json").exists()
    )


@pytest.mark.parametrize("name", ["2gpu", "4gpu", "8gpu", "32gpu", "256gpu"])
def test_the_packages_clusters(name: str) -> None:
    found = recipes.read(compose.load("plan", ["recipe=maniskill_ppo", f"cluster={name}"]))
    assert sum(node.count * node.gpus for node in found.cluster.nodes) == int(
        name.removesuffix("gpu")
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes:\n  - {name: big, gpuss: 2}\n", ["gpuss"]),
        ("nodes:\n  - {name: big, gpus: 1, cpus: 0}\n", ["nodes[0].cpus=0 is out of range"]),
        ("nodes: [\n", ["mine"]),
        ("node: 3\n", ["node"]),
    ],
)
def test_an_invalid_cluster(
    rlinf_vla: CommandLine,
    counting: Counting,
    unmeasured: None,
    known: str,
    text: str,
    words: list[str],
) -> None:
    complaint = rlinf_vla(
        *counting.arguments("plan", "counting_ppo", cluster_file(counting, text), known)
    ).complaint
    assert all(word in complaint for word in words), complaint


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["profile=nowhere.json"], "nowhere.json cannot be read"),
        (["env.episode_limit=12", "algorithm.horizon=12"], "measure again"),
        (["algorithm.horizon=8"], "algorithm.horizon=8 is not a multiple"),
    ],
)
def test_a_mistake(
    rlinf_vla: CommandLine,
    counting: Counting,
    unmeasured: None,
    known: str,
    arguments: list[str],
    word: str,
    tmp_path: Path,
) -> None:
    found = rlinf_vla(
        *counting.arguments(
            "plan",
            "counting_ppo",
            *([] if arguments[0].startswith("profile=") else [known]),
            *arguments,
        )
    )
    assert word in found.complaint and not (tmp_path / "runs").exists()
