"""Recording the expert as a dataset and training on it, by the command line."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf_vla.data.lerobot_reader import LeRobotReader
from rlinf_vla.rollout.recording import RecordedEpisode
from rlinf_vla.telemetry.metrics import read_metrics
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.data.old_versions import V21, rewrite

LEROBOT = Path(__file__).parents[1] / "data/fixtures"
QUICK = "evaluation.before_and_after=false"


@pytest.mark.parametrize("recipe", ["counting_sft", "counting_ppo"])
def test_a_dataset_of_the_expert(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, recipe: str
) -> None:
    shown = [
        "algorithm.demonstrations.episodes=8",
        "algorithm.demonstrations.noise=[0.0,0.8]",
        "algorithm.demonstrations.random_actions=0.5",
    ]
    found = rlinf_vla(*counting.arguments("record", recipe, "output=some", *shown))
    assert found.code == 0, found.err
    assert (
        rlinf_vla(
            *counting.arguments(
                "record", recipe, "output=all", "record.failures=true", "record.video=false", *shown
            )
        ).code
        == 0
    )
    some, everything = LeRobotReader(tmp_path / "some"), LeRobotReader(tmp_path / "all")
    assert (
        0 < len(some) < len(everything) == 8
        and f"8 episodes played, {len(some)} with success" in found.out
    )
    assert (
        some.features["observation.images.base"].dtype == "video"
        and everything.features["observation.images.base"].dtype == "image"
    )
    assert some.fps == 10 and all(
        some.episode(number, ["next.success"]).columns["next.success"][-1]
        for number in range(len(some))
    )
    assert all(env.closed for env in counting.plugin.created)


def test_imitation_of_a_recording_needs_no_simulator(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    keep = ["record.failures=true", "record.video=false"]
    assert rlinf_vla(*counting.arguments("record", "counting_sft", "output=data", *keep)).code == 0
    opened = len(counting.plugin.created)
    dataset = [
        "algorithm.demonstrations.dataset=data",
        "algorithm.demonstrations.action_key=expert_action",
    ]
    of_dataset = rlinf_vla(
        *counting.arguments("train", "counting_sft", "run_dir=recorded", QUICK, *dataset)
    )
    assert of_dataset.code == 0, of_dataset.err
    assert len(counting.plugin.created) == opened
    assert (
        rlinf_vla(*counting.arguments("train", "counting_sft", "run_dir=played", QUICK)).code == 0
    )
    learnt = [
        (tmp_path / name / "policy/model.safetensors").read_bytes()
        for name in ("recorded", "played")
    ]
    assert learnt[0] == learnt[1], "the same states and the same labels"


@pytest.mark.slow
def test_an_older_version_is_imitated_shared_and_never_continued(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    keep = ["record.failures=true", "record.video=false"]
    assert rlinf_vla(*counting.arguments("record", "counting_sft", "output=new", *keep)).code == 0
    rewrite(tmp_path / "new", tmp_path / "old", V21)
    for name in ("new", "old"):
        keys = [QUICK, f"run_dir=of_{name}", f"algorithm.demonstrations.dataset={name}"]
        found = rlinf_vla(*counting.arguments("train", "counting_sft", *keys))
        assert found.code == 0, found.err
    one, other = (
        (tmp_path / f"of_{name}/policy/model.safetensors").read_bytes() for name in ("new", "old")
    )
    assert one == other
    refused = rlinf_vla(*counting.arguments("record", "counting_sft", "output=old", *keep))
    assert "old is not empty: choose another directory" in refused.complaint
    shown = rlinf_vla("push", "old", "me/old", "--license", "mit", "--dry-run")
    assert shown.code == 0 and "A LeRobotDataset v2.1" in shown.out, shown.err
    sent = [line.split()[-1] for line in shown.out.splitlines() if " bytes  " in line]
    files = (path for path in (tmp_path / "old").rglob("*") if path.is_file())
    assert sorted(sent) == sorted(
        ["README.md", *(path.relative_to(tmp_path / "old").as_posix() for path in files)]
    )


@pytest.mark.parametrize("kind", ["image", "video"])
def test_imitation_of_what_lerobot_recorded(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, kind: str
) -> None:
    """``tests/data/lerobot_peer.py`` recorded the datasets with lerobot itself."""
    dataset = [
        f"algorithm.demonstrations.dataset={LEROBOT / kind}",
        "algorithm.demonstrations.cameras=[base:front]",
    ]
    LinearPolicy(LinearOptions(chunk=2, action_dim=2)).save(tmp_path / "model")
    model = ["model.checkpoint=model", "model.options.action_dim=2"]
    found = rlinf_vla(
        *counting.arguments("train", "counting_sft", f"run_dir={kind}", QUICK, *dataset, *model)
    )
    assert found.code == 0, found.err
    before, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("model", f"{kind}/policy")
    )
    assert before.keys() == after.keys() and not torch.equal(
        before["logits.weight"], after["logits.weight"]
    )


def test_co_training_on_a_recording(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path
) -> None:
    assert (
        rlinf_vla(
            *counting.arguments("record", "counting_sft", "output=data", "record.failures=true")
        ).code
        == 0
    )
    cotraining = ["algorithm.sft_coef=1.0", "algorithm.demonstrations.dataset=data", "run_dir=ppo"]
    found = rlinf_vla(*counting.arguments("train", "counting_ppo", QUICK, *cotraining))
    assert found.code == 0, found.err
    assert any("sft/loss" in line for line in read_metrics(tmp_path / "ppo"))
    found = rlinf_vla(
        *counting.arguments("train", "counting_sac", QUICK, "algorithm.dataset=data", "run_dir=sac")
    )
    assert found.code == 0, found.err
    assert any("demonstrations/success" in line for line in read_metrics(tmp_path / "sac"))


def test_mistakes_are_one_line(rlinf_vla: CommandLine, counting: Counting, tmp_path: Path) -> None:
    def complaint(recipe: str, *overrides: str) -> str:
        return rlinf_vla(*counting.arguments("record", recipe, *overrides)).complaint

    assert complaint("counting_sft").startswith("record needs an output directory")
    assert complaint("counting_sac", "output=data").startswith(
        "record needs algorithm.demonstrations"
    )
    assert "leave algorithm.demonstrations.dataset out" in complaint(
        "counting_sft", "output=data", "algorithm.demonstrations.dataset=x"
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "full is not empty" in complaint("counting_sft", "output=full")
    hopeless = [
        "env.episode_limit=1",
        "algorithm.demonstrations.episodes=3",
        "algorithm.demonstrations.noise=[9.0]",
    ]
    assert "the expert succeeded in none of 3 episodes" in complaint(
        "counting_sft", "output=data", *hopeless
    )
    assert not (tmp_path / "data").exists()
    imitation = rlinf_vla(
        *counting.arguments(
            "train", "counting_sft", "algorithm.demonstrations.dataset=nowhere", QUICK
        )
    )
    assert imitation.complaint == "nowhere is not a directory: name one that holds a LeRobotDataset"


NOISY = [
    "algorithm.demonstrations.episodes=8",
    "algorithm.demonstrations.noise=[0.0,0.8]",
    "algorithm.demonstrations.random_actions=0.5",
]


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def at_the_fifth(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """The fifth episode that is written, and whatever happens then."""
    write = RecordedEpisode.write

    def writing(episode: RecordedEpisode, path: Path, frames: bool = True) -> None:
        if path.name == "episode_000004.npz":
            happens()
        write(episode, path, frames)

    monkeypatch.setattr(RecordedEpisode, "write", writing)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ENDS: dict[str, tuple[Callable[[], object], int, int]] = {
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), 143, 5),
    "Ctrl-C": (lambda: os.kill(os.getpid(), signal.SIGINT), 130, 5),
    "a full disk": (full, 1, 4),
}
"""What ends the recording, its exit code, and the episodes that were played."""


@pytest.mark.parametrize("video", ["true", "false"])
@pytest.mark.parametrize("end", ENDS)
def test_an_interrupted_recording_is_a_dataset_and_continues(
    rlinf_vla: CommandLine,
    counting: Counting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    video: str,
) -> None:
    happens, code, played = ENDS[end]
    command = counting.arguments(
        "record", "counting_sft", "output=data", f"record.video={video}", *NOISY
    )
    assert rlinf_vla(*[each.replace("output=data", "output=whole") for each in command]).code == 0
    with monkeypatch.context() as patch:
        at_the_fifth(patch, happens)
        ended = rlinf_vla(*command)
    kept = len(LeRobotReader(tmp_path / "data"))
    assert ended.code == code and 0 < kept <= played
    assert (
        f"{played} of 8 episodes were played, {kept} of them are the dataset data: the same command continues"
        in ended.err
    )
    again = rlinf_vla(*command)
    assert again.code == 0 and f"{played} of 8 episodes are in .data.episodes" in again.out, (
        again.err
    )
    assert (
        files_of(tmp_path / "data") == files_of(tmp_path / "whole")
        and not (tmp_path / ".data.episodes").exists()
    )


def test_a_killed_recording_continues(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = counting.arguments(
        "record", "counting_sft", "output=data", "record.video=false", *NOISY
    )
    with monkeypatch.context() as patch:
        at_the_fifth(patch, full)
        rlinf_vla(*command)
    shutil.rmtree(tmp_path / "data")  # SIGKILL leaves the episodes' files alone
    (tmp_path / ".data.episodes/published.json").unlink()
    assert len(list((tmp_path / ".data.episodes").glob("*.npz"))) == 4
    other = rlinf_vla(*command, "algorithm.demonstrations.noise=[0.5]")
    assert "holds other episodes: algorithm.demonstrations.noise was" in other.complaint
    assert rlinf_vla(*command).code == 0 and (tmp_path / "data/meta/info.json").exists()


def test_a_dataset_of_another_recording_is_not_replaced(
    rlinf_vla: CommandLine, counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = counting.arguments(
        "record", "counting_sft", "output=data", "record.video=false", *NOISY
    )
    with monkeypatch.context() as patch:
        at_the_fifth(patch, full)
        rlinf_vla(*command)
    info = tmp_path / "data/meta/info.json"
    info.write_text(info.read_text().replace("counter", "other"))
    assert "data is not empty: choose another directory" in rlinf_vla(*command).complaint
    assert "other" in info.read_text()
