"""In a process of their own, whose children are known: those of this one may include whatever other tests have started."""

from __future__ import annotations

import subprocess
import sys

from rlinf_vla.telemetry.process_usage import Usage

PARENT = """
import subprocess, sys
from rlinf_vla.telemetry.process_usage import usage

print(*usage(), flush=True)
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(*usage(), flush=True)
    child.communicate(b"\\n")
print(*usage())
"""
BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def before_during_after(child: str) -> list[Usage]:
    said = subprocess.run([sys.executable, "-c", PARENT, child], capture_output=True, text=True, check=True).stdout
    found = [line.split() for line in said.splitlines()]
    return [Usage(int(processes), float(cpu), int(resident)) for processes, cpu, resident in found]


def test_what_a_child_takes_is_seen_while_it_lives() -> None:
    before, during, after = before_during_after(BUSY)
    assert (before.processes, during.processes, after.processes) == (0, 1, 0)
    assert during.cpu > 0.15 and during.resident > 1e6
    assert before == after == (0, 0, 0)


def test_a_grandchild_counts() -> None:
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
    assert [found.processes for found in before_during_after(code)] == [0, 2, 0]
