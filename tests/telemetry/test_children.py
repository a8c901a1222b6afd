from __future__ import annotations

import subprocess
import sys

from rlinf_vla.telemetry.children import usage

BUSY = "import os, time\nwhile time.process_time() < 0.2: pass\nprint(os.getpid(), flush=True)\ninput()"


def test_what_a_child_takes_is_seen_while_it_lives() -> None:
    before = usage()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = usage()
        assert during.processes == before.processes + 1
        assert during.cpu - before.cpu > 0.15 and during.resident - before.resident > 1e6
        child.communicate(b"\n")
    assert usage().processes == before.processes


def test_a_grandchild_counts() -> None:
    before = usage()
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert usage().processes == before.processes + 2
        child.communicate(b"\n")
