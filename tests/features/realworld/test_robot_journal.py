from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

from rlinf_vla.features.realworld.episode import TRAINING, Job, RobotEpisode
from rlinf_vla.features.realworld.recorder import LOST, recover_episode
from rlinf_vla.features.realworld.robot import Intervention
from tests.features.realworld.toy_cell import Toy

JOB = Job(TRAINING, 3, seed=7)


def killed_at_its_end(path: Path) -> RobotEpisode:
    """An episode with a hold in it and a person's steps; ``path`` is what a kill just before its end would have left."""
    journal_path = path.with_name("journal")
    toy = Toy(limit=12, journal_path=journal_path)
    slow = iter([20.0] * 3 + [230.0] + [20.0] * 30)
    toy.delay = lambda request: next(slow) / 1024
    toy.operator.acts = lambda hand: (
        np.array([0.0, 1.0, 0.0, 1.0], np.float32) if len(toy.robot.commands) in (7, 8) else None
    )
    reported = iter(
        [0, 0, 2, 1, 0, 0, 3] + [0] * 30
    )  # on the way home, before the first action, and after each
    toy.robot.interventions = lambda: [Intervention(0.0, "speed", 2.0, 1.0)] * next(reported)  # type: ignore[method-assign]
    found = list[RobotEpisode]()

    def keep(episode: RobotEpisode) -> None:
        toy.player.journal.flush()
        path.write_bytes(journal_path.read_bytes())
        found.append(episode)

    toy.player.play(JOB, keep, weights=2)
    assert not journal_path.exists(), "an episode that is kept is under way no more"
    return found[0]


def same_beginning(cut: RobotEpisode, whole: RobotEpisode) -> None:
    steps = len(cut)
    assert (cut.job, cut.task, cut.instruction, cut.weights) == (
        whole.job,
        whole.task,
        whole.instruction,
        whole.weights,
    )
    for name in ("action", "human", "reward", "cost"):
        assert torch.equal(getattr(cut, name), getattr(whole, name)[:steps]), name
        assert getattr(cut, name).dtype == getattr(whole, name).dtype
    for name in ("state", "tick"):
        assert torch.equal(getattr(cut, name), getattr(whole, name)[: steps + 1]), name
    for name, value in cut.images.items():
        assert torch.equal(value, whole.images[name][: steps + 1])
    assert (cut.ended, cut.fault, cut.terminated, cut.success) == (LOST, True, False, False)


def test_all_but_the_last_action_is_there(tmp_path: Path) -> None:
    whole = killed_at_its_end(tmp_path / "left")
    cut = recover_episode(tmp_path / "left")
    assert sum(whole.interventions.values()) == whole.cost.sum() == 6 and whole.cost[
        :2
    ].tolist() == [2, 1]
    assert (
        cut is not None
        and len(cut) == len(whole) - 1
        and whole.human.any()
        and torch.diff(whole.tick).max() > 1
    )
    same_beginning(cut, whole)
    same_beginning(RobotEpisode.read(cut.write(tmp_path)), whole)


def test_wherever_it_was_cut(tmp_path: Path) -> None:
    whole = killed_at_its_end(tmp_path / "left")
    path = tmp_path / "shorter"
    data = (tmp_path / "left").read_bytes()
    lengths = set[int]()
    for size in [*range(0, len(data), 37), len(data)]:
        path.write_bytes(data[:size])
        if (cut := recover_episode(path)) is not None:
            same_beginning(cut, whole)
            lengths.add(len(cut))
    assert lengths == set(range(1, len(whole)))


def test_what_cannot_be_read_ends_it(tmp_path: Path) -> None:
    whole = killed_at_its_end(tmp_path / "left")
    path = tmp_path / "left"
    data = path.read_bytes()
    begins = [0]
    while begins[-1] < len(data):
        begins.append(begins[-1] + 8 + int.from_bytes(data[begins[-1] : begins[-1] + 8], "little"))
    fifth = slice(*begins[5:7])  # the first says what is played
    # cut in its length, so that all behind it is misaligned; no tensors, and the others whole
    for damaged in (data[fifth][:3], data[fifth][:8] + bytes(fifth.stop - fifth.start - 8)):
        path.write_bytes(data[: fifth.start] + damaged + data[fifth.stop :])
        cut = recover_episode(path)
        assert cut is not None
        same_beginning(cut, whole)
        assert len(cut) == 3, "four actions, and nobody knows what came of the last"


def test_nothing_is_written_behind_a_record_that_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    left = list[bytes]()
    toy = Toy(limit=12, journal_path=path)
    opens = Path.open
    appended = list[Path]()

    def full_once(self: Path, mode: str = "r") -> IO[Any]:
        if self == path and mode == "ab":
            appended.append(self)
            if len(appended) == 4:
                with opens(self, mode) as file:
                    file.write(bytes([99, 0, 0]))  # of its length
                raise OSError(28, "No space left on device")
        return opens(self, mode)

    monkeypatch.setattr(Path, "open", full_once)

    def keep(episode: RobotEpisode) -> None:
        with suppress(OSError):
            toy.player.journal.flush()
        left.append(path.read_bytes())
        toy.keep(episode)

    with pytest.raises(OSError, match="No space left"):
        toy.player.play(JOB, keep)
    assert path.read_bytes().endswith(bytes([99, 0, 0]))
    cut = recover_episode(path)
    assert cut is not None and len(cut) == 2 and len(toy.episodes[0]) > 5
    same_beginning(cut, toy.episodes[0])
    toy.player.play(JOB, keep)
    path.write_bytes(left[1])
    cut = recover_episode(path)
    assert cut is not None and len(cut) == len(toy.episodes[1]) - 1, "the next episode begins anew"


@pytest.mark.parametrize(
    "left",
    [
        None,
        b"",
        b"1234567",
        b"\xff" * 100,
        b"\x02" + bytes(7) + b"[]",
        b"\x04" + bytes(7) + b"null" + bytes(8),
    ],
)
def test_what_is_no_episode_is_none(tmp_path: Path, left: bytes | None) -> None:
    if left is not None:
        (tmp_path / "left").write_bytes(left)
    assert recover_episode(tmp_path / "left") is None


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    toy = Toy(journal_path=tmp_path / "file" / "journal")
    with pytest.raises(OSError, match="file"):
        toy.player.play(JOB, toy.keep)
    assert len(toy.episodes) == 1, "and the episode is kept nevertheless"
