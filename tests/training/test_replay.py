"""Replay compared with a list, with kills, full disks and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.transitions import Transitions
from rlinf_vla.training import replay as module
from rlinf_vla.training.replay import Replay, ShardedReplay, sample_mixed


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT", 8)


def episode(first: int, length: int, terminated: bool) -> dict[str, Tensor]:
    """Records with unique numbers; a truncated episode has one more observation."""
    number = torch.arange(first, first + length + (not terminated))
    acted = torch.ones(len(number), dtype=torch.bool)
    if not terminated:
        acted[-1] = False
    discount = torch.full((len(number),), 0.9)
    discount[length - 1] = 0.0 if terminated else 0.9
    image = (number[:, None, None] % 256).expand(-1, 4, 3).to(torch.uint8)
    return {"number": number, "image": image, "discount": discount, "acted": acted}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fill(store: Replay, lengths: list[int]) -> list[int]:
    """The numbers of records with an action."""
    acted = []
    for i, length in enumerate(lengths):
        new = episode(store.total, length, terminated=i % 2 == 0)
        store.append(new)
        acted += new["number"][new["acted"]].tolist()
    return acted


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(3, 40))
def test_the_newest_records_and_their_next_observations(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], capacity: int
) -> None:
    store = Replay(tmp_path_factory.mktemp("replay"), capacity)
    acted = [number for number in fill(store, lengths) if number >= store.total - capacity]
    assert len(store) == len(acted)
    if not acted:
        return
    found = store.sample(400, generator())
    assert set(found.now["number"].tolist()) <= set(acted)
    assert len(acted) > 12 or set(found.now["number"].tolist()) == set(acted), (
        "every transition is drawn"
    )
    goes_on = found.now["discount"] > 0
    assert torch.equal(found.following["number"][goes_on], found.now["number"][goes_on] + 1)
    assert torch.equal(found.now["image"][:, 0, 0].long(), found.now["number"] % 256)


def test_sampling_is_uniform(tmp_path: Path) -> None:
    store = Replay(tmp_path / "replay", 100)
    acted = fill(store, [7, 5, 8])
    counts = torch.bincount(store.sample(40_000, generator()).now["number"], minlength=store.total)[
        acted
    ].double()
    expected = 40_000 / len(acted)
    assert float(((counts - expected) ** 2 / expected).sum()) < 45, (
        "chi-square of 19 degrees, p = 0.0007"
    )


def test_resume_from_a_checkpoint_discards_later_records(tmp_path: Path) -> None:
    straight = Replay(tmp_path / "straight", 20)
    fill(straight, [9, 6])
    stopped = Replay(tmp_path / "stopped", 20)
    fill(stopped, [9, 6])
    total = stopped.total
    stopped.flush()
    fill(stopped, [3, 11])  # lost with the process
    again = Replay(tmp_path / "stopped", 20, total)
    for store in (straight, again):
        fill(store, [4, 5, 2])
    first, second = straight.sample(50, generator(1)), again.sample(50, generator(1))
    for name, value in first.now.items():
        assert torch.equal(value, second.now[name]) and torch.equal(
            first.following[name], second.following[name]
        )


def test_a_checkpoint_without_its_files_is_refused(tmp_path: Path) -> None:
    store = Replay(tmp_path / "replay", 20)
    fill(store, [9])
    (tmp_path / "replay" / "segment_000001" / "acted").unlink()
    with pytest.raises(
        UserError, match=r"segment_000001/acted is missing or truncated: resume another checkpoint"
    ):
        Replay(tmp_path / "replay", 20, store.total)
    (tmp_path / "replay" / "layout.json").unlink()
    with pytest.raises(UserError, match=r"layout\.json cannot be read"):
        Replay(tmp_path / "replay", 20, store.total)


def test_files_that_no_checkpoint_needs_are_deleted(tmp_path: Path) -> None:
    store = Replay(tmp_path / "replay", 10)
    fill(store, [9, 8])
    kept = store.total
    fill(store, [20, 20])
    store.forget(kept)
    again = Replay(tmp_path / "replay", 10, kept)
    assert len(again.sample(30, generator()).now["number"]) == 30
    store = Replay(tmp_path / "replay", 10, kept)
    fill(store, [20, 20])
    store.forget(store.total)
    assert len(list((tmp_path / "replay").glob("segment_*"))) <= 3
    store.sample(30, generator())


def test_a_full_disk_is_an_error_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Replay(tmp_path / "replay", 100)
    fill(store, [5])
    total = store.total

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        store.append(episode(store.total, 30, True))
    assert store.total == total and len(store) == 5
    monkeypatch.undo()
    monkeypatch.setattr(module, "SEGMENT", 8)
    store.append(episode(store.total, 30, True))
    assert store.sample(100, generator()).now["number"].max() == store.total - 1


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    code = f"""
import sys, torch
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.training.test_replay import Replay, fill
store = Replay(Path({str(tmp_path / "replay")!r}), 5000)
fill(store, [2000]); store.flush()
print(store.total, flush=True)
while True: fill(store, [700])
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        total = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    module.SEGMENT = 1024
    store = Replay(tmp_path / "replay", 5000, total)
    found = store.sample(500, generator())
    assert len(store) == 2000 and torch.equal(
        found.now["image"][:, 0, 0].long(), found.now["number"] % 256
    )


def test_a_fixed_share_of_each_store(tmp_path: Path) -> None:
    online, shown = Replay(tmp_path / "online", 100), Replay(tmp_path / "shown", 100)
    fill(online, [30])
    shown.append(episode(1000, 10, True))
    found = sample_mixed([online, shown], [0.5, 0.5], 9, generator()).now["number"]
    assert len(found) == 9 and (found >= 1000).sum() == 4
    assert (sample_mixed([online, shown], [1.0, 0.0], 8, generator()).now["number"] < 1000).all()


def test_records_of_another_kind_are_refused(tmp_path: Path) -> None:
    store = Replay(tmp_path / "replay", 100)
    fill(store, [3])
    with pytest.raises(ValueError, match="earlier ones have"):
        store.append({"acted": torch.ones(2, dtype=torch.bool)})


def together(parts: list[Transitions], size: int) -> dict[str, Tensor]:
    """The rows of all ranks in the order of the batch; with the following records as ``next.*``."""
    found: dict[str, Tensor] = {}
    seen = torch.zeros(size)
    for part in parts:
        assert part.of_rank is not None and len(part) == size
        if not part.of_rank.counts:
            continue
        seen[part.of_rank.rows] += 1
        for name, value in (
            part.now | {f"next.{name}": value for name, value in part.following.items()}
        ).items():
            whole = found.setdefault(name, torch.zeros(size, *value.shape[1:], dtype=value.dtype))
            whole[part.of_rank.rows] = value
    assert (seen == 1).all(), "every row belongs to one rank"
    return found


def test_parts_of_means_and_rows_of_random_numbers(tmp_path: Path) -> None:
    stores = [ShardedReplay(tmp_path, rank, 3, 100) for rank in range(3)]
    for number in range(4):
        for store in stores:
            store.append(episode(10 * number, 5, True))
    parts = [store.sample(20, generator()) for store in stores]
    numbers = together(parts, 20)["number"]
    draws = torch.rand(20, 2, generator=generator(1))
    mean = sum(part.part((part.now["number"][:, None] * part.own(draws)).mean(0)) for part in parts)
    torch.testing.assert_close(mean, (numbers[:, None] * draws).mean(0))


lengths_of_episodes = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(
    lengths_of_episodes, lengths_of_episodes, st.integers(3, 40), st.integers(1, 4), st.booleans()
)
def test_ranks_draw_the_batches_of_one_replay(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[int],
    later: list[int],
    capacity: int,
    ranks: int,
    fetched: bool,
) -> None:
    """Each rank its own rows, also after a resume from the files that a checkpoint keeps, without what was stored after it."""
    folder = tmp_path_factory.mktemp("replay")
    alone = Replay(folder / "one", capacity)
    parts = [ShardedReplay(folder / "many", rank, ranks, capacity) for rank in range(ranks)]

    def add(stores: list[Any], lengths: list[int], first: int) -> None:
        for i, length in enumerate(lengths):
            new = episode(first + 20 * i, length, terminated=i % 2 == 0)
            for store in stores:
                store.append(new if store.stores_next else {"acted": new["acted"]})

    def check() -> None:
        assert {len(alone)} == {len(store) for store in parts} and {alone.total} == {
            store.total for store in parts
        }
        if not len(alone):
            return
        whole = alone.sample(30, generator())
        found = together([store.sample(30, generator()) for store in parts], 30)
        goes_on = whole.now["discount"] > 0
        for name, value in whole.now.items():
            assert torch.equal(found[name], value)
            assert torch.equal(found[f"next.{name}"][goes_on], whole.following[name][goes_on])

    add([alone, *parts], first, 0)
    check()
    if fetched:
        for store in parts:
            store.flush()
            store.forget(alone.total)
        add(parts, [7, 9], 5000)  # lost with the processes
        parts[:] = [
            ShardedReplay(folder / "many", rank, ranks, capacity, alone.total)
            for rank in range(ranks)
        ]
        check()
    add([alone, *parts], later, 1000)
    check()


def test_a_rank_without_rows_gets_its_newest_record_which_does_not_count(tmp_path: Path) -> None:
    """Even if it is too old to be drawn, and its file the only one left."""
    stores = [ShardedReplay(tmp_path, rank, 2, 10) for rank in range(2)]
    for number, length in enumerate([3, 4, 30]):
        for store in stores:
            store.append(episode(100 * number, length, True))
            store.forget(store.total)
    full, empty = (sample_mixed([store, store], [1.0, 0.0], 6, generator()) for store in stores)
    assert len(together([full, empty], 6)["number"]) == 6
    assert empty.now["number"].tolist() == [103] and len(empty) == 6
    assert float(empty.part(torch.tensor(5.0))) == 0 and float(full.part(torch.tensor(5.0))) == 5
