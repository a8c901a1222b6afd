"""Disk writes in the background."""

from __future__ import annotations

import threading
from pathlib import Path

from rlinf_vla.robots.runtime_folder import BackgroundWriter, Journal, Latch


def test_writes_are_in_order_and_do_not_block(tmp_path: Path) -> None:
    later = BackgroundWriter()
    may = threading.Event()
    later(may.wait)
    latch = Latch(tmp_path, later)
    journal = Journal(tmp_path / "journal", later)
    latch.add("first")
    assert not later.settle(0.01)
    latch.add("second")
    journal.write("fault", durable=True)
    assert Latch(tmp_path).fault is None, "the caller did not block"
    may.set()
    assert later.settle(120)
    assert (
        Latch(tmp_path).faults == latch.faults == ("first", "second")
        and "fault" in (tmp_path / "journal").read_text()
        and later.problem is None
    )
    journal.close()
    later.close()


def test_a_full_disk_is_reported_without_an_exception() -> None:
    later = BackgroundWriter()
    journal = Journal(Path("/dev/full"), later)
    journal.write("fault", durable=True)
    journal.write("end", durable=True)
    journal.close()
    assert not later.settle(120)
    assert (
        later.problem == "disk: No space left on device; faults and the journal cannot be written"
    )
    later.close()
