"""Runs the tests in two lanes, repeats alone what failed, and says what each lane took: ``make test``, ``make test-all``.

    python tests/run.py                    # all tests but those marked slow, realtime or nightly
    python tests/run.py --all              # with slow and realtime ones; every extra must be installed
    python tests/run.py --nightly          # those marked nightly alone

A test that fails runs once more at the end, in one process and with nothing beside it. One that passes then is listed
as FLAKY and added to tests/flaky.md. It fails the run if it is in that list already, or if there are more than three.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lanes import MACHINE, PURE, file_of, lane  # noqa: E402
from tests.record import Found, dearest  # noqa: E402

FLAKY = Path(__file__).with_name("flaky.md")
MOST_FLAKY = 3
MOST_REPEATED = 12
"""Failures of one run. More are no chance, and are not repeated."""
WORKERS = min(8, len(os.sched_getaffinity(0)))
"""Each needs 2 GB of memory."""
LONGEST = 40
COMPLETE = (0, 1, 5)
"""Exit codes of pytest after all of its tests, or none, have run."""


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    name: str
    options: tuple[str, ...]
    marks: str
    tests: tuple[str, ...] = ()
    """Where they are; empty: in all files."""


def parts(everything: bool) -> list[Part]:
    """In the first, one worker runs the files that start several processes, the others all else (tests/purity.py)."""
    slow = "" if everything else "not slow and "
    found = [
        Part(
            "lanes",
            ("-n", str(WORKERS), "--dist", "loadfile"),
            f"{slow}not realtime and not nightly",
        )
    ]
    return (
        [*found, Part("realtime", ("-n", "0"), "realtime and not nightly", ("tests/robots",))]
        if everything
        else found
    )


NIGHTLY = [Part("nightly", ("-n", "0"), "nightly")]
REPEATED = Part("repeated", ("-n", "0"), "")


@dataclass
class Ran:
    part: Part
    minutes: float
    found: Found


@dataclass
class Verdict:
    """What the repetition of the failed tests showed."""

    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Reasons to fail besides the failed tests."""

    @property
    def passed(self) -> bool:
        return not self.failed and not self.refused


def pytest_once(part: Part, options: Sequence[str], tests: Sequence[str]) -> Ran:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        record, listed = Path(folder, "record.json"), Path(folder, "names")
        listed.write_text("".join(f"{name}\n" for name in tests or part.tests))
        command = [
            sys.executable,
            "-m",
            "pytest",
            *part.options,
            "-m",
            part.marks,
            f"--record={record}",
            *options,
            f"@{listed}",
        ]
        code = subprocess.run(command, cwd=ROOT).returncode
        found = Found.read(record) if record.exists() else Found()
    if code not in COMPLETE and not found.refused:
        found.refused.append(f"{part.name}: pytest ended with exit code {code}")
    return Ran(part, (time.monotonic() - began) / 60, found)


def to_repeat(found: Found) -> list[str]:
    """The failed tests; of one that failed when it was taken down, its whole module."""
    return list(
        dict.fromkeys(
            file_of(name) if failure.in_teardown else name
            for name, failure in found.failures.items()
        )
    )


def judge(first: Found, again: Found, listed: str) -> Verdict:
    """``again`` is the repetition, which may be empty; ``listed`` the text of tests/flaky.md."""
    verdict = Verdict(refused=[*first.refused, *again.refused])
    for name, failure in first.failures.items():
        repeated = [
            each
            for each in again.cpu_s
            if each == name or (failure.in_teardown and file_of(each) == file_of(name))
        ]
        passed = repeated and not again.failures.keys() & {*repeated, name}
        (verdict.flaky if passed else verdict.failed).append(name)
    verdict.failed += [name for name in again.failures if name not in first.failures]
    known = [name for name in verdict.flaky if row(name) in listed]
    verdict.refused += [
        f"{name} passed only when repeated, and is in {FLAKY.name} already: mend it first"
        for name in known
    ]
    if len(verdict.flaky) > MOST_FLAKY:
        verdict.refused.append(
            f"{len(verdict.flaky)} tests passed only when repeated: at most {MOST_FLAKY} may"
        )
    return verdict


def row(name: str) -> str:
    """The beginning of a test's line in the list."""
    return f"| `{name.replace('|', chr(92) + '|')}` |"


def note(names: Sequence[str], path: Path) -> None:
    """Adds lines to the list."""
    text = path.read_text()
    path.write_text(
        text
        + "".join(
            f"{row(name)} {date.today()} | not known yet |\n"
            for name in names
            if row(name) not in text
        )
    )


def times(ran: Ran) -> list[str]:
    """A line for a part, and for its lanes if it has both. A lane's minutes are those of its tests one after the other."""
    of_lanes = {
        name: [test for test in ran.found.cpu_s if lane(ROOT / file_of(test)) == name]
        for name in (PURE, MACHINE)
    }
    lines = [line(ran.part.name, ran.minutes, ran.found, list(ran.found.cpu_s))]
    if all(of_lanes.values()):
        for name, tests in of_lanes.items():
            lines.append(
                line(
                    f"  {name}",
                    sum(ran.found.seconds[test] for test in tests) / 60,
                    ran.found,
                    tests,
                )
            )
    return lines


def line(name: str, minutes: float, found: Found, tests: Sequence[str]) -> str:
    return (
        f"{name:10} {minutes:7.1f} {len(tests):7} {sum(found.cpu_s[test] for test in tests):12.0f}"
    )


def table(ran: Sequence[Ran]) -> list[str]:
    return ["           minutes   cases  CPU-seconds", *chain.from_iterable(map(times, ran))]


def longest(found: Found) -> list[str]:
    """The files whose tests took most minutes one after the other, of which a worker runs each."""
    files: dict[str, list[str]] = {}
    for name in found.cpu_s:
        files.setdefault(file_of(name), []).append(name)
    rows = [
        (sum(found.seconds[name] for name in tests) / 60, sum(found.cpu_s[name] for name in tests))
        for tests in files.values()
    ]
    ordered = sorted(zip(rows, files, strict=True), reverse=True)[:LONGEST]
    return [
        "the longest files, in minutes and CPU-seconds:",
        *(f"  {minutes:6.2f} {cpu_s:7.0f}  {file}" for (minutes, cpu_s), file in ordered),
    ]


def summary(ran: Sequence[Ran], verdict: Verdict, first: Found) -> list[str]:
    lines = ["", *table(ran), *dearest(first), *longest(first)]
    for name in verdict.flaky:
        lines += [
            f"FLAKY {name} failed, and passed when repeated alone. The failure:",
            first.failures[name].text,
        ]
    lines += [f"FAILED {name}" for name in verdict.failed]
    lines += [f"REFUSED {reason}" for reason in verdict.refused]
    lines.append("passed" if verdict.passed else "failed")
    return lines


def run_parts(
    chosen: Sequence[Part], options: Sequence[str], tests: Sequence[str]
) -> tuple[list[Ran], Verdict, Found]:
    ran: list[Ran] = []
    first = Found()
    for part in chosen:
        print(f"== {part.name}", flush=True)
        ran.append(pytest_once(part, options, tests))
        first += ran[-1].found
    again = Found()
    if 0 < len(first.failures) <= MOST_REPEATED:
        print("== what failed, once more and alone", flush=True)
        ran.append(pytest_once(REPEATED, options, to_repeat(first)))
        again = ran[-1].found
    verdict = judge(first, again, FLAKY.read_text())
    note(verdict.flaky, FLAKY)
    print("\n".join(summary(ran, verdict, first)), flush=True)
    return ran, verdict, first


def page(command: str, ran: Sequence[Ran], verdict: Verdict, first: Found) -> str:
    """What was measured: a row for each lane, and for each folder of tests."""
    from rlinf_vla.telemetry.environment import fingerprint

    machine = fingerprint()
    cases = len(first.cpu_s)
    at_once = cases - len({*verdict.failed, *verdict.flaky})
    lines = [
        f"# `{command}`",
        "",
        f"{date.today()}, {machine['cores']} cores of {machine['cpu']}, {sum(each.minutes for each in ran):.1f} minutes.",
        f"**{at_once} of {cases} tests passed at once, {len(verdict.flaky)} when repeated, {len(verdict.failed)} failed.**",
        "",
        "```",
        *table(ran),
        "```",
        "",
        "| folder | tests | minutes one after the other | CPU-seconds |",
        "|---|---|---|---|",
    ]
    folders: dict[str, list[str]] = {}
    for name in first.cpu_s:
        folders.setdefault("/".join(Path(file_of(name)).parts[:-1]), []).append(name)
    for folder, tests in sorted(folders.items()):
        minutes = sum(first.seconds[name] for name in tests) / 60
        lines.append(
            f"| `{folder}` | {len(tests)} | {minutes:.1f} | {sum(first.cpu_s[name] for name in tests):.0f} |"
        )
    lines += ["", "```", *dearest(first), "```"]
    return "\n".join([*lines, *(f"\n{reason}" for reason in verdict.refused)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="slow and realtime tests too; no extra may be missing"
    )
    parser.add_argument(
        "--nightly", action="store_true", help="only what takes too long for each change"
    )
    parser.add_argument("--page", type=Path, help="write what was measured")
    parser.add_argument("tests", nargs="*", help="only these files")
    arguments = parser.parse_args()
    options = ["--all-extras"] if arguments.all or arguments.nightly else []
    options += ["--all-peers"] if arguments.nightly else []
    try:
        ran, verdict, first = run_parts(
            NIGHTLY if arguments.nightly else parts(arguments.all), options, arguments.tests
        )
    except KeyboardInterrupt:
        return 130
    if arguments.page:
        command = (
            "make test-nightly"
            if arguments.nightly
            else "make test-all"
            if arguments.all
            else "make test"
        )
        arguments.page.write_text(page(command, ran, verdict, first))
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
