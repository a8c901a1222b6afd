"""Processes that run blocks: which losses end a sweep. These workers run no episodes but follow a script."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rlinf_vla.config.errors import Failure
from rlinf_vla.core.child_process import Child
from rlinf_vla.features.sweeps import block_workers
from rlinf_vla.features.sweeps.block_workers import BlockWorkers
from rlinf_vla.features.sweeps.blocks import Block, Job

WORKER = """
import sys
from pathlib import Path
from rlinf_vla.core.channel import Channel
script, parent = Path(sys.argv[1]), Channel.to_parent()
while True:
    name = str(parent.wait()["block"]["seeds"][0])
    lines = script.read_text().splitlines()
    mine = next((each for each in lines if each.split()[0] == name), name + " done")
    if mine in lines:
        lines.remove(mine)
        script.write_text("\\n".join(lines))
    for word in mine.split()[1:]:
        if word == "dies":
            sys.exit("as the script says")
        said = {"done": {"done": name}, "fails": {"failure": "no server answers"}}
        parent.send(said.get(word) or {"reached": float(word)})
"""
Play = Callable[[str, int], tuple[list[int], int]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs blocks in one worker; returns their seeds as they are done, and the number of lost workers.

    ``script``: of each attempt, the block's seed and what the worker does; those that it does not name are done at once.
    """
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "script").touch()
    program = [str(tmp_path / "worker.py"), str(tmp_path / "script")]
    monkeypatch.setattr(block_workers, "Child", lambda _: Child(program))

    def run(script: str, blocks: int) -> tuple[list[int], int]:
        (tmp_path / "script").write_text(script)
        done = list[int]()
        with closing(BlockWorkers(1, timeout=200.0)) as workers:
            jobs = [Job(Block(0, 0, 0, (seed,))) for seed in range(blocks)]
            workers.run(jobs, tmp_path, lambda job, fraction: done.append(job.block.seeds[0]))
            return done, workers.losses

    return run


def test_workers_that_make_progress_may_be_lost_any_number_of_times(play: Play) -> None:
    lost = ["dies", "dies", "0.2 dies", "0.2 dies", "0.4 dies", "0.1 0.3 dies", "0.2 0.6 dies"]
    assert play("\n".join(f"1 {each}" for each in lost), 3) == ([0, 1, 2], 7)


def test_losses_are_counted_for_each_block(play: Play) -> None:
    assert play("\n".join(f"{block} dies" for block in range(5) for _ in range(2)), 5) == (
        [0, 1, 2, 3, 4],
        10,
    )


@pytest.mark.parametrize(
    "lost", [["dies"] * 3, ["0.5 dies"] * 3, ["0.2 dies", "0.5 dies", "0.4 dies", "0.5 dies"]]
)
def test_losses_without_progress_end_the_sweep(play: Play, lost: list[str]) -> None:
    with pytest.raises(
        Failure,
        match=r"3 processes in a row died or hung while playing block 00_000_000_0000001, .*: as the script says",
    ):
        play("\n".join(f"1 {each}" for each in lost), 3)


def test_several_answers_at_once_are_all_received(play: Play) -> None:
    assert play("0 0.1 0.2 0.3 0.4 0.5 done", 2) == ([0, 1], 0)


def test_a_failure_in_a_worker_ends_the_sweep_at_once(play: Play) -> None:
    with pytest.raises(Failure, match=r"^no server answers$"):
        play("0 0.5 fails", 2)
