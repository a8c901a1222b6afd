"""The numerical tests on each instruction set of this machine: ``python tests/portability.py PAGE`` (``make portability``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

import torch

from rlinf_vla.telemetry.environment import fingerprint

FOLDERS = ("algorithms", "core", "evaluation", "models", "parity", "rollout", "runtime", "training")
"""Tests of computations; the others do not depend on PyTorch's rounding."""

ATEN = "ATEN_CPU_CAPABILITY"
MKL = "MKL_CBWR"
ONEDNN = "ONEDNN_MAX_CPU_ISA"
THREADS = "OMP_NUM_THREADS"


def settings() -> list[dict[str, str]]:
    """No limit, each library limited to older instruction sets, all to the oldest, and two threads."""
    narrower = {ATEN: ("default", "avx2"), MKL: ("COMPATIBLE", "AVX2"), ONEDNN: ("SSE41", "AVX2")}
    limits = [{library: name} for library, names in narrower.items() for name in names]
    oldest = {library: names[0] for library, names in narrower.items()}
    return [{THREADS: "1"} | limit for limit in ({}, *limits, oldest)] + [{THREADS: "2"}]


def run(
    setting: Mapping[str, str], folder: Path
) -> tuple[dict[str, int], dict[str, float], list[str]]:
    """Numbers of tests by outcome, the parity tests' ratios by quantity, and the names of the tests that failed."""
    report = folder / "report.xml"
    tests = [str(Path(__file__).parent / name) for name in FOLDERS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "loadfile",
        f"--junitxml={report}",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    subprocess.run(
        command, env=os.environ | setting | {"PARITY_RATIOS": str(folder)}, stdout=sys.stderr
    )
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.attrib['classname']}.{case.attrib['name']}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    ratios: dict[str, float] = {}
    for path in folder.glob("*.json"):
        for name, ratio in json.loads(path.read_text()).items():
            ratios[name] = max(ratio, ratios.get(name, 0.0))
    return counts, ratios, failed


def main(page: Path) -> int:
    began = time.strftime("%Y-%m-%d")
    rows = []
    failures = 0
    machine = fingerprint()
    for setting in settings():
        with tempfile.TemporaryDirectory() as folder:
            counts, ratios, failed = run(setting, Path(folder))
        name = max(ratios, key=lambda each: ratios[each])
        failures += len(failed)
        passed = counts["tests"] - counts["skipped"] - len(failed)
        said = " ".join(f"`{key}={value}`" for key, value in setting.items())
        rows.append(
            f"| {said} | {passed} | {', '.join(failed) or 'none'} | {ratios[name]:.2f} ({name}) |"
        )
    text = f"""# The numerical tests on other instruction sets

`make portability`, {began}. {machine["cpu"]}, {machine["cores"]} cores, PyTorch {torch.__version__}
({torch.backends.cpu.get_cpu_capability()} by default).

Each line is a run of the tests in {", ".join(FOLDERS)},
with one library limited to one instruction set. Parity tests compare with numbers that the official
implementations computed on another machine. The last column is the largest ratio of the official
numbers' distance from the float64 result to this run's own float32 rounding, and the quantity where
it was found. A test fails above a ratio of 8 (`tests/parity/precision.py`). Known mistakes, such as
another GELU, another epsilon or one layer in bfloat16, are above it in every run
(`tests/parity/test_precision.py`).

| setting | passed | failed | largest ratio |
|---|---|---|---|
""" + "".join(f"{row}\n" for row in rows)
    page.write_text(text)
    print(text)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
