"""``push`` and ``pull`` with the real client, at a server on this machine that acts as the Hub."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from rlinf_vla.cli.shared_files import without_private
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.hub_server import TOKEN, Handler, Hub, serving

BASE = "lab/linear"
pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # of httpx, at its client


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with serving(monkeypatch, str(tmp_path_factory.mktemp("client"))) as server:
        yield server


@pytest.fixture
def run(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> Path:
    """A run of two iterations with evaluations, and with what must stay here."""
    found = rlinf_vla(*counting.arguments("train", "counting_ppo", f"run_dir={tmp_path}/run"))
    assert found.code == 0, found.out + found.err
    directory = tmp_path / "run"
    (directory / "replay").mkdir()
    (directory / "replay" / "0.safetensors").write_bytes(b"transitions")
    (directory / "checkpoints" / "step_000002" / "notes.pkl").write_bytes(pickle.dumps("secret"))
    (directory / "token.json").write_text(json.dumps({"token": TOKEN}))
    return directory


@pytest.fixture
def base(hub: Hub, counting: Counting) -> Hub:
    """The Hub holds the initial model of ``run``, under the MIT licence."""
    files = {path.name: path.read_bytes() for path in (counting.folder / "model").iterdir()}
    hub.holds("models", BASE, files | {"README.md": b"---\nlicense: mit\n---\n"})
    return hub


def metadata(card: bytes) -> dict[str, Any]:
    return yaml.safe_load(card.decode().split("---\n")[1])


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


CHECKPOINT = "checkpoints/step_000002"
OF_A_RUN = {
    *(
        f"{CHECKPOINT}/{name}"
        for name in ("COMPLETE", "adapter/adapter_config.json", "adapter/adapter_model.safetensors")
    ),
    *(f"{CHECKPOINT}/{name}" for name in ("heads.safetensors", "state.json")),
    *(
        "README.md",
        "recipe.yaml",
        "environment.json",
        "evaluation/before.json",
        "evaluation/after.json",
    ),
}


@pytest.mark.slow
def test_a_run_there_and_back(
    rlinf_vla: CommandLine, counting: Counting, base: Hub, run: Path, tmp_path: Path
) -> None:
    found = rlinf_vla(
        "push", str(run), "me/counter", "--base-model", BASE, "--dataset", "lab/counts"
    )
    assert found.code == 0, found.out + found.err
    there = base.repositories["models/me/counter"].files()
    assert there.keys() - {".gitattributes"} == OF_A_RUN
    for name in ("adapter/adapter_model.safetensors", "heads.safetensors"):
        assert there[f"{CHECKPOINT}/{name}"] == (run / CHECKPOINT / name).read_bytes()
    everything = b"".join(there.values())
    assert (
        str(tmp_path).encode() not in everything
        and str(counting.folder).encode() not in everything
        and TOKEN.encode() not in everything
    )
    card = metadata(there["README.md"])
    text = there["README.md"].decode()
    assert (card["license"], card["base_model"], card["datasets"], card["pipeline_tag"]) == (
        "mit",
        BASE,
        ["lab/counts"],
        "robotics",
    )
    assert {"rlinf-vla", "ppo", "linear", "counter"} <= set(card["tags"])
    after = json.loads((run / "evaluation" / "after.json").read_text())["sampled"]
    low, high = after["pc_success_ci95"]
    assert (
        f"| this checkpoint | sampled | 5 | {after['pc_success']:.1f} % | {low:.1f} to {high:.1f} % |"
        in text
    )
    assert "| before training |" in text and "* command: `rlinf-vla" in text and "gamma:" in text

    found = rlinf_vla("pull", "me/counter@main", "pulled")
    assert found.code == 0 and "(use it as run=pulled)" in found.out, found.out + found.err
    assert contents(tmp_path / "pulled") == {
        name: content for name, content in there.items() if name != ".gitattributes"
    }
    played = [rlinf_vla("eval", f"run={path}", "episodes=5", "--json") for path in ("pulled", run)]
    assert [each.code for each in played] == [0, 0], played[0].err
    mine, theirs = (json.loads(each.out)["sampled"]["episodes"] for each in played)
    assert mine == theirs
    assert (
        "shared without its optimiser state"
        in rlinf_vla("train", "run=pulled", "iterations=3").complaint
    )
    again = [
        "run_dir=new",
        "resume=never",
        f"checkpoint=pulled/{CHECKPOINT}",
        "evaluation.before_and_after=false",
    ]
    found = rlinf_vla("train", "run=pulled", *again)
    assert found.code == 0 and (tmp_path / "new" / CHECKPOINT / "COMPLETE").exists(), (
        found.out + found.err
    )


def test_a_dry_run_sends_nothing(rlinf_vla: CommandLine, base: Hub, run: Path) -> None:
    found = rlinf_vla(
        "push", str(run / CHECKPOINT), "me/counter", "--base-model", BASE, "--dry-run"
    )
    assert found.code == 0 and "nothing was sent" in found.out and "license: mit" in found.out, (
        found.err
    )
    assert all(f"bytes  {name}\n" in found.out for name in OF_A_RUN)
    assert base.sent == [] and base.repositories.keys() == {f"models/{BASE}"}
    base.requests.clear()
    assert (
        rlinf_vla(
            "push",
            str(run),
            "me/counter",
            "--base-model",
            BASE,
            "--license",
            "apache-2.0",
            "--dry-run",
        ).code
        == 0
    )
    assert base.requests == []


def test_a_licence_is_never_invented(rlinf_vla: CommandLine, base: Hub, run: Path) -> None:
    base.holds("models", BASE, {"README.md": b"---\ntags: [robotics]\n---\n"})
    assert (
        f"the card of {BASE} states none: give --license"
        in rlinf_vla("push", str(run), "me/x", "--base-model", BASE).complaint
    )
    assert base.sent == []


def test_an_earlier_checkpoint_has_no_results_of_the_last(
    rlinf_vla: CommandLine, base: Hub, run: Path
) -> None:
    found = rlinf_vla(
        "push", str(run / "checkpoints/step_000001"), "me/x", "--base-model", BASE, "--dry-run"
    )
    assert (
        found.code == 0
        and "before.json" in found.out
        and "after.json" not in found.out
        and "this checkpoint |" not in found.out
    )


def test_an_existing_repository_needs_a_revision(
    rlinf_vla: CommandLine, base: Hub, run: Path
) -> None:
    push = ["push", str(run), "me/x", "--base-model", BASE]
    assert rlinf_vla("push", str(run / "checkpoints/step_000001"), *push[2:], "--private").code == 0
    there = base.repositories["models/me/x"]
    assert there.private and "checkpoints/step_000001/COMPLETE" in there.files()
    assert (
        "me/x: exists already: choose another name, or give --revision main"
        in rlinf_vla(*push).complaint
    )
    assert rlinf_vla(*push, "--revision", "main").code == 0
    assert {name for name in there.files() if name.startswith("checkpoints/")} == {
        each for each in OF_A_RUN if CHECKPOINT in each
    }
    assert (
        rlinf_vla(*push, "--revision", "v2").code == 0
        and there.files("v2").keys() == there.files().keys()
    )
    there.private = False
    assert "me/x is public" in rlinf_vla(*push, "--revision", "main", "--private").complaint


def test_a_model_directory(
    rlinf_vla: CommandLine, counting: Counting, hub: Hub, run: Path, tmp_path: Path
) -> None:
    assert rlinf_vla("export", f"run={run}", "output=merged").code == 0
    (tmp_path / "merged" / "training_args.bin").write_bytes(pickle.dumps("rubbish"))
    (tmp_path / "merged" / "optimizer.safetensors").write_bytes(b"moments")
    found = rlinf_vla("push", "merged", "me/merged", "--license", "mit")
    assert found.code == 0, found.err
    there = hub.repositories["models/me/merged"].files()
    assert there.keys() == {
        ".gitattributes",
        "README.md",
        "config.json",
        "model.safetensors",
        "heads.safetensors",
        "environment.json",
    }
    assert (
        str(tmp_path).encode() not in b"".join(there.values())
        and b"base_model" not in there["README.md"]
    )
    rest = ["checkpoint=null", "model.lora.rank=0", "evaluation.filmed=0"]
    found = rlinf_vla(
        *counting.arguments(
            "eval", "counting_ppo", "model.checkpoint=hf://me/merged", "run_dir=played", *rest
        )
    )
    assert found.code == 0, found.err
    assert rlinf_vla("pull", "me/merged", "pulled").code == 0
    assert (tmp_path / "pulled" / "model.safetensors").read_bytes() == (
        tmp_path / "merged" / "model.safetensors"
    ).read_bytes()


def test_a_dataset(rlinf_vla: CommandLine, counting: Counting, hub: Hub, tmp_path: Path) -> None:
    assert rlinf_vla(*counting.arguments("record", "counting_sft", "output=data")).code == 0
    (tmp_path / "data" / "credentials.json").write_text("{}")
    recorded = contents(tmp_path / "data")
    assert "push needs a licence" in rlinf_vla("push", "data", "me/counts").complaint
    assert rlinf_vla("push", "data", "me/counts", "--license", "cc-by-4.0").code == 0
    there = hub.repositories["datasets/me/counts"]
    assert there.tags["v3.0"] == there.branches["main"]
    card = metadata(there.files()["README.md"])
    assert (
        card["license"] == "cc-by-4.0"
        and "LeRobot" in card["tags"]
        and card["task_categories"] == ["robotics"]
    )
    assert card["configs"] == [{"config_name": "default", "data_files": "data/*/*.parquet"}]
    assert (
        rlinf_vla("push", "data", "me/counts", "--license", "cc-by-4.0", "--revision", "main").code
        == 0
    )
    assert there.tags["v3.0"] == there.branches["main"], "the tag is moved"
    found = rlinf_vla("pull", "me/counts@v3.0", "pulled")
    assert found.code == 0 and "algorithm.demonstrations.dataset=pulled" in found.out, found.err
    pulled = contents(tmp_path / "pulled")
    assert (
        pulled.pop("README.md")
        and pulled.items()
        == {name: recorded[name] for name in recorded if name != "credentials.json"}.items()
    )


def model(hub: Hub, name: str, tmp_path: Path, **changes: bytes) -> None:
    LinearPolicy(LinearOptions(chunk=2)).save(tmp_path / "source")
    hub.holds(
        "models",
        name,
        contents(tmp_path / "source")
        | {key.replace("__", "."): value for key, value in changes.items()},
    )


def test_pull_takes_data_only(rlinf_vla: CommandLine, hub: Hub, tmp_path: Path) -> None:
    model(hub, "me/x", tmp_path, modeling__py=b"raise SystemExit", weights__pkl=b"pickle")
    assert rlinf_vla("pull", "me/x", "pulled").code == 0
    assert contents(tmp_path / "pulled").keys() == {"config.json", "model.safetensors"}
    assert not [each for each in hub.requests if each.endswith((".py", ".pkl"))]


def test_what_arrives_damaged_is_refused_and_nothing_is_left(
    rlinf_vla: CommandLine, base: Hub, run: Path, tmp_path: Path
) -> None:
    assert rlinf_vla("push", str(run), "me/x", "--base-model", BASE).code == 0
    there = base.repositories["models/me/x"]
    whole = there.files()
    for changed, words in (
        ({f"{CHECKPOINT}/state.json": b"{}"}, "is damaged (state.json is missing or changed)"),
        ({f"{CHECKPOINT}/heads.safetensors": b"no tensors"}, "cannot be read as safetensors"),
        ({"recipe.yaml": b"- rubbish"}, "has no recipe name"),
    ):
        there.commit("main", whole | changed)
        assert words in rlinf_vla("pull", "me/x", "pulled").complaint
    there.commit(
        "main", {name: content for name, content in whole.items() if not name.endswith("COMPLETE")}
    )
    assert "is not a complete checkpoint" in rlinf_vla("pull", "me/x", "pulled").complaint
    there.commit("main", {"README.md": b"nothing"})
    assert (
        "has no checkpoint, model or LeRobotDataset"
        in rlinf_vla("pull", "me/x", "pulled").complaint
    )
    there.commit("main", whole | {"../escaped.json": b"{}"})
    assert "leaves the directory" in rlinf_vla("pull", "me/x", "pulled").complaint
    assert {path.name for path in tmp_path.iterdir()} == {"run"}, "nothing is left behind"


def test_what_the_hub_refuses_is_one_line(
    rlinf_vla: CommandLine,
    hub: Hub,
    counting: Counting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push = ["push", str(counting.folder / "model")]
    assert (
        "has no such repository, or it is private"
        in rlinf_vla("pull", "me/missing", "pulled").complaint
    )
    model(hub, "me/x", tmp_path)
    assert "me/x@v9 has no such revision" in rlinf_vla("pull", "me/x@v9", "pulled").complaint
    assert (
        "has no right to do that" in rlinf_vla(*push, "forbidden/x", "--license", "mit").complaint
    )
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "wants a valid token" in rlinf_vla(*push, "me/y", "--license", "mit").complaint


def failed(found: Any) -> str:
    assert found.code == 1 and found.err.count("\n") == 1 and found.err.startswith("rlinf-vla: "), (
        found.err
    )
    return found.err


def test_a_hub_that_is_out_of_reach_is_a_failure(
    rlinf_vla: CommandLine, hub: Hub, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = ["push", str(counting.folder / "model"), "me/y", "--license", "mit"]
    monkeypatch.setattr(Handler, "create", lambda self, asked: self.answer(500, {"error": "oh"}))
    assert "answered 500" in failed(rlinf_vla(*push))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    assert "me/y: http://127.0.0.1:9 is out of reach (" in failed(rlinf_vla(*push))
    assert "is out of reach (" in failed(rlinf_vla("pull", "me/y", "pulled"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["push", "run"],
            "push: the following arguments are required: repository (rlinf-vla push RUN ORG/NAME",
        ),
        (["push", "run", "name"], "push: name names no repository: write ORG/NAME"),
        (
            ["push", ".", "me/x"],
            "push: . is no run (recipe.yaml), checkpoint, model directory (config.json) or LeRobotDataset",
        ),
        (["push", "nowhere", "me/x"], "run=nowhere: no such directory"),
        (
            ["pull", "name", "there"],
            "pull: name names no repository: write ORG/NAME or ORG/NAME@REVISION",
        ),
        (["pull", "me/x"], "pull: the following arguments are required: directory"),
    ],
)
def test_mistakes(rlinf_vla: CommandLine, hub: Hub, arguments: list[str], words: str) -> None:
    assert words in rlinf_vla(*arguments).complaint and hub.requests == []


def test_a_pickle_with_the_name_of_weights_is_not_shared(
    rlinf_vla: CommandLine, hub: Hub, tmp_path: Path
) -> None:
    LinearPolicy(LinearOptions(chunk=2)).save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(pickle.dumps("rubbish"))
    assert (
        "cannot be read as safetensors"
        in rlinf_vla("push", "model", "me/x", "--license", "mit").complaint
        and hub.requests == []
    )


def test_a_directory_of_this_machine_needs_its_repository(
    rlinf_vla: CommandLine, hub: Hub, run: Path
) -> None:
    assert (
        "is a directory of this machine: give its repository with --base-model"
        in rlinf_vla("push", str(run), "me/x").complaint
    )


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/home/me/runs", "PATH"),
        ("run_dir=/home/me/runs seed=1", "run_dir=PATH seed=1"),
        ("[/data/a,/data/b]", "[PATH,PATH]"),
        ("file:///home/me", "PATH"),
        ("in ~/runs and ~me/runs", "in PATH and PATH"),
        ("/home/me/Secret Client (new)/x", "PATH"),
        ("<s> </s> a</think>b </home/me>", "<s> </s> a</think>b <PATH"),
        ("https://user:word@host/path", "https://SECRETU"),
        ("PATH=/usr/bin:/home/me/bin", "PATH=PATH"),
        (
            "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        ),
        (f"--token {TOKEN}", "--token SECRET"),
        (
            "hf://org/name@main asset://compact runs/a/b 3/4 pick / place",
            "hf://org/name@main asset://compact runs/a/b 3/4 pick / place",
        ),
    ],
)
def test_what_is_private(text: str, cleaned: str) -> None:
    assert without_private({text: [text]}) == {
        cleaned.replace("SECRETU", "SECREThost/path"): [
            cleaned.replace("SECRETU", "SECREThost/path")
        ]
    }


@pytest.mark.parametrize(
    ("word", "cleaned"),
    [
        ("run_dir=/home/me/Secret Client/x", "run_dir=PATH"),
        ("run_dir='/home/me/runs (Client)/x'", "run_dir='PATH"),
        ("sweep.policies=[start,/home/me/Secret Client/x]", "sweep.policies=[start,PATH"),
        ("/usr/bin/rlinf-vla train", "PATH"),
        ("recipe=maniskill_ppo", "recipe=maniskill_ppo"),
    ],
)
def test_a_word_of_the_command_is_redacted_to_its_end(word: str, cleaned: str) -> None:
    """Its path may hold spaces and parentheses."""
    assert without_private({"environment": {"argv": [word, "seed=1"]}}) == {
        "environment": {"argv": [cleaned, "seed=1"]}
    }
