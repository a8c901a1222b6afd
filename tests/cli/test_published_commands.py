"""Commands of the documentation that name published checkpoints: each fits, and runs, on stand-ins of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlinf_vla.cli import compose
from rlinf_vla.models.openvla.cards import CARDS as OPENVLA
from rlinf_vla.models.pi0.cards import CARDS as PI0
from tests.cli.conftest import CommandLine
from tests.cli.test_reproductions import PLAYED, SMALL, TRAINING, fetched_weights
from tests.hub_server import Hub
from tests.skips import require
from tests.stand_ins import STAND_INS, files
from tests.test_documentation import PAGES, ROOT, commands

FORMS = {"ORG/NAME", "me/push-cube-merged"}
"""Repositories of the reader."""
LOCAL = {"/data/pi05_libero": "RLinf/RLinf-Pi05-LIBERO-SFT"}
"""Folders of the reader -> a repository with the same layout."""
CARDS = [*OPENVLA, *PI0]
BASES = sorted(name for name, stand_in in STAND_INS.items() if stand_in.kind.endswith("_base"))
EVALUATED = sorted(
    name
    for name, stand_in in STAND_INS.items()
    if stand_in.kind in ("openvla_oft_l1", "lerobot_pi0", "lerobot_pi05")
)
EVALUATED += sorted(name for name in STAND_INS if name.startswith("openvla/") and "libero" in name)


def named() -> Iterator[tuple[str, str]]:
    """Yield the page and the command, each command once."""
    seen = set()
    for page in PAGES:
        inline = (
            found.split()
            for found in re.findall(r"`rlinf-vla ((?:train|eval) [^`]*)`", page.read_text())
        )
        for words in (*commands(page.read_text()), *inline):
            line = " ".join(word for word in words if word != "--dry-run")
            repository = re.search(r"hf://([^ ]+)", line)
            if line not in seen and (
                (repository and repository[1] not in FORMS) or any(place in line for place in LOCAL)
            ):
                seen.add(line)
                yield str(page.relative_to(ROOT)), line


COMMANDS = list(named())


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """PyTorch says that there is a GPU, of 24 GB unless a test changes it."""
    properties = SimpleNamespace(name="NVIDIA A10", total_memory=24e9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator",
        lambda check_available=False: torch.device("cuda"),
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    return properties


def with_folders(words: list[str], tmp_path: Path) -> list[str]:
    """Put folders of this machine in the place of the reader's."""
    for place, repository in LOCAL.items():
        folder = tmp_path / Path(place).name
        words = [word.replace(place, str(folder)) for word in words]
        for path, content in files(repository).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    return words


def test_each_repository_that_a_page_names_has_a_stand_in() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    names = set(re.findall(r"hf://([\w-]+/[\w.-]*\w)", pages)) - FORMS
    assert COMMANDS and names and names <= STAND_INS.keys()


def test_each_card_describes_a_stand_in() -> None:
    patterns = {pattern for card in CARDS for pattern in card.repositories}
    assert {
        pattern
        for pattern in patterns
        if not any(fnmatchcase(name.lower(), pattern) for name in STAND_INS)
    } == set()


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_a_page_fits(
    rlinf_vla: CommandLine,
    page: str,
    line: str,
    hub: Hub,
    tmp_path: Path,
    one_gpu: SimpleNamespace,
) -> None:
    require("libero" if "libero" in line else "maniskill")
    verb, *keys = with_folders(line.split(), tmp_path)
    found = rlinf_vla(verb, *keys, *(["--dry-run"] if verb in ("train", "eval") else []))
    assert found.code == 0, found.out + found.err


@pytest.mark.slow
@pytest.mark.parametrize("memory_gb", [24, pytest.param(80, marks=pytest.mark.nightly)])
def test_the_first_command_of_a_gpu_fits_its_memory(
    rlinf_vla: CommandLine,
    memory_gb: int,
    one_gpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the published sizes; the Hub is out of reach."""
    require("libero")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    one_gpu.total_memory = memory_gb * 1e9
    (line,) = re.findall(
        rf"^\| a GPU of {memory_gb} GB .*`rlinf-vla (.*)` \|$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    refused = rlinf_vla(*line.split(), "--dry-run")
    assert "is not complete in" in refused.complaint and "; " not in refused.complaint
    assert re.search(rf"peak: \d\d % of {memory_gb}.0 GB", refused.out), refused.out


def often(line: str) -> bool:
    """Whether a command runs for each change: README's. Recipes of published runs are run elsewhere."""
    return "gradient_checkpointing" in line


@pytest.mark.slow
@pytest.mark.simulator
@pytest.mark.parametrize(
    ("page", "line"),
    [
        pytest.param(page, line, marks=() if often(line) else pytest.mark.nightly)
        for page, line in COMMANDS
        if line.startswith(("train", "eval"))
    ],
)
def test_a_command_of_a_page_runs(
    rlinf_vla: CommandLine, page: str, line: str, hub: Hub, tmp_path: Path
) -> None:
    require("libero")
    verb, *given = with_folders(line.split(), tmp_path)
    keys = [
        *(key for key in given if not key.startswith("cluster=")),
        "cluster=1gpu",
        "cluster.device=cpu",
    ]  # laptop has own sizes
    if verb == "train":
        algorithm = str(compose.load("train", keys).algorithm.name)
        sizes = (*TRAINING, *SMALL[algorithm])
    else:
        sizes = (*PLAYED, "env.tasks=[0]")
    found = rlinf_vla(verb, *keys, f"run_dir={tmp_path}/run", *sizes)
    assert found.code == 0, found.out + found.err


@pytest.mark.parametrize("repository", EVALUATED)
def test_a_published_checkpoint_needs_no_further_key(
    rlinf_vla: CommandLine, repository: str, hub: Hub
) -> None:
    require("libero")
    model = "pi0" if "pi0" in repository else "openvla_oft" if "oft" in repository else "openvla"
    suite = "libero_10" if "pi0" in repository else f"libero_{repository.rpartition('-')[2]}"
    keys = ["model.options.unnorm_key=libero_10_no_noops"] if "spatial-object" in repository else []
    command = (
        "eval",
        "recipe=libero_eval",
        f"model={model}",
        f"model.checkpoint=hf://{repository}",
        f"env.suites=[{suite}]",
    )
    found = rlinf_vla(*command, *keys, "--dry-run")
    assert found.code == 0, found.out + found.err
    assert not fetched_weights(hub)


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        (["sweep.policies=[start,random]"], "env.convention=openvla env.cameras=['base','wrist']"),
        (["sweep.policies=[random,start]", "env.cameras=[base,wrist]"], "env.convention=openvla"),
    ],
)
def test_policies_that_need_different_environments_are_not_compared(
    rlinf_vla: CommandLine,
    keys: list[str],
    remedy: str,
    hub: Hub,
) -> None:
    """What the message proposes is accepted."""
    require("libero")
    model = [
        "model=openvla_oft",
        "model.checkpoint=hf://moojink/openvla-7b-oft-finetuned-libero-spatial",
    ]
    command = ("eval", "recipe=libero_eval", "env.suites=[libero_spatial]", *model, *keys)
    for verb in ("--dry-run", "run_dir=run"):
        assert rlinf_vla(*command, verb).complaint.endswith(
            f"do not: set {remedy}, or leave one out"
        )
    assert rlinf_vla(*command, *remedy.split(), "--dry-run").code == 0
    assert not fetched_weights(hub)


def test_models_that_need_different_environments_are_not_compared(
    rlinf_vla: CommandLine, hub: Hub
) -> None:
    """A model of the Hub is judged by its description, too."""
    require("libero")
    names = (
        "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1",
        "moojink/openvla-7b-oft-finetuned-libero-spatial",
    )
    command = (
        "eval",
        "recipe=libero_eval",
        "env.suites=[libero_spatial]",
        "model=openvla_oft",
        f"model.checkpoint=hf://{names[0]}",
    )
    other = f"sweep.policies=[start,hf://{names[1]}]"
    assert rlinf_vla(*command, other, "--dry-run").complaint.endswith(
        f"start and hf://{names[1]} do not: leave one out"
    )
    assert rlinf_vla(*command, other, "env.cameras=[base,wrist]", "--dry-run").code == 0
    same = (
        "sweep.policies=[start,random]",
        "env.convention=openvla",
        "env.cameras=null",
        "--dry-run",
    )
    assert rlinf_vla(*command, *same).code == 0, "the camera of the default is that of the card"
    assert not fetched_weights(hub)


def test_a_task_without_an_expert_is_refused_before_others_are_played(
    rlinf_vla: CommandLine, hub: Hub
) -> None:
    require("libero")
    refused = rlinf_vla(
        "eval", "recipe=libero_eval", "env.suites=[libero_10]", "--dry-run"
    ).complaint
    assert "libero_10-0 has no scripted expert: leave expert out" in refused


@pytest.mark.parametrize("repository", BASES)
def test_a_base_model_is_refused_with_what_it_lacks(
    rlinf_vla: CommandLine, repository: str, hub: Hub
) -> None:
    found = rlinf_vla(
        "eval",
        "recipe=libero_eval",
        "model=pi0",
        f"model.checkpoint=hf://{repository}",
        "--dry-run",
    )
    assert "has no statistics of its state, as lerobot's base models" in found.complaint
    assert not fetched_weights(hub)
