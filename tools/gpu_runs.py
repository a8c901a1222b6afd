"""Parts of tools/prove_gpu.py that run what exists: the conformance suites, and training."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

from gpu_kit import Kit
from prove_gpu import ROOT

from rlinf_vla.cli import main as cli
from rlinf_vla.telemetry.metrics import read_metrics


def conformance(kit: Kit) -> None:
    """The tests that every model plug-in inherits."""
    import pytest

    from rlinf_vla.testing.policy import DiscretePolicyConformance, PolicyConformance

    os.environ["RLINF_VLA_TEST_DEVICE"] = kit.device.type
    names = [name for suite in (PolicyConformance, DiscretePolicyConformance) for name in vars(suite) if name.startswith("test_")]
    files = ["test_compact.py"] if kit.tiny else ["test_compact.py", "test_openvla.py", "test_openvla_oft.py", "test_pi0.py", "test_smolvla.py", "test_gr00t.py"]
    (kit.folder / "pytest.ini").write_text("[pytest]\n")
    counts = Counts()
    settings = ["-q", f"-c{kit.folder / 'pytest.ini'}", f"--basetemp={kit.folder / 'pytest'}", "--noconftest", "-pno:cacheprovider"]
    settings += ["-k", " or ".join(names)]
    for file in files:
        counts.clear()
        pytest.main([*settings, str(ROOT / "tests" / "models" / file)], plugins=[counts])
        kit.add(file, ", ".join(f"{count} {how}" for how, count in sorted(counts.items())), "no failures")
        assert counts.get("passed") and not counts.get("failed"), f"{file}: {dict(counts)}"


class Counts(dict[str, int]):
    """A plug-in of pytest that counts outcomes."""

    def pytest_runtest_logreport(self, report: object) -> None:
        outcome, when = getattr(report, "outcome", ""), getattr(report, "when", "")
        if when == "call" or outcome != "passed":
            self[outcome] = self.get(outcome, 0) + 1


def rehearsal(kit: Kit) -> None:
    """The runs that the simulated GPU rehearses: each checks its log-probabilities itself."""
    simulated = import_module("tests.cli.test_simulated_gpu")
    simulated.announce(kit.folder / "package")
    sys.path.insert(0, str(kit.folder / "package"))
    (kit.folder / "recipe").mkdir()
    os.chdir(kit.folder)
    missing = [module for module in ("av", "pyarrow") if find_spec(module) is None]  # datasets, with which demonstrations are read
    for run in list(simulated.RUNS)[:: 12 if kit.tiny else 1]:
        words = simulated.arguments(kit.folder, run, run.replace(" ", "-"))
        if missing and any("demonstrations" in word for word in words):
            kit.add(run, f"left out: {', '.join(missing)} missing")
            continue
        code = cli.run([*words, *(["cluster=1gpu"] if kit.device.type == "cuda" else [])])
        finite = False
        if code == 0:
            tensors, _ = simulated.numbers(kit.folder / run.replace(" ", "-"))
            finite = all(bool(value.isfinite().all()) for value in tensors.values())
        kit.add(run, "done, finite weights" if finite else f"**exit code {code}**", "done")
        assert finite, run


def maniskill(kit: Kit) -> None:
    """The main job, with the simulator on the GPU: one group, and two that take turns."""
    few = ["cluster=laptop", "env.num_envs=2", "rollout.batch_size=1", "env.episode_limit=4", "algorithm.horizon=8"]
    few += ["algorithm.minibatch_size=4", "algorithm.epochs=1"]
    for depth in (1, 2):
        on_gpu = ["cluster=1gpu", "env.backend=gpu", "env.num_envs=64", f"rollout.batch_size={64 // depth}"]
        run = kit.folder / f"depth_{depth}"
        words = ["train", "recipe=maniskill_ppo", "iterations=2", "evaluation.before_and_after=false", f"run_dir={run}"]
        code = cli.run([*words, *(few if kit.tiny else on_gpu), f"rollout.pipeline_depth={depth}"])
        assert code == 0, f"exit code {code}"
        for row in read_metrics(run):
            shown = {name: value for name, value in row.items() if "steps_per_s" in name or "grad_norm" in name or "return" in name}
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
            kit.add(f"pipeline depth {depth}, iteration {row['step']}", numbers)
