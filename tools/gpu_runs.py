"""Parts of tools/prove_gpu.py that run what exists: the conformance suites, and training."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

from gpu_kit import Kit
from prove_gpu import PACKAGES, ROOT

from rlinf_vla.cli import main as cli
from rlinf_vla.telemetry.metrics import read_metrics


def conformance(kit: Kit) -> None:
    """The tests that every model plug-in inherits; the files of tests in processes side by side."""
    from rlinf_vla.testing.policy import DiscretePolicyConformance, PolicyConformance

    names = [name for suite in (PolicyConformance, DiscretePolicyConformance) for name in vars(suite) if name.startswith("test_")]
    models = ["compact"] if kit.tiny else ["compact", "openvla", "openvla_oft", "pi0", "smolvla", "gr00t"]
    (kit.folder / "pytest.ini").write_text("[pytest]\n")
    # pytest puts the repository first in the path, where rlinf_vla has no plug-ins
    start = f"import sys; sys.path.append({str(PACKAGES)!r}); import pytest, rlinf_vla.models; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", start]
    command += ["-q", f"-c{kit.folder / 'pytest.ini'}", "--noconftest", "-pno:cacheprovider", "-k", " or ".join(names)]
    environment = os.environ | {"RLINF_VLA_TEST_DEVICE": kit.device.type}
    processes = {}
    for model in models:
        words = [*command, f"--basetemp={kit.folder / model}", str(ROOT / "tests" / "models" / f"test_{model}.py")]
        processes[model] = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    for model, process in processes.items():
        output = process.communicate()[0]
        print(output)
        kit.add(model, output.strip().splitlines()[-1], "no failures")
    assert not any(process.returncode for process in processes.values())


def rehearsal(kit: Kit) -> None:
    """The runs that the simulated GPU rehearses: each checks its log-probabilities itself."""
    simulated = import_module("tests.cli.test_simulated_gpu")
    import_module("tests.cli.counting_plugins").announce(kit.folder / "package")
    sys.path.insert(0, str(kit.folder / "package"))
    (kit.folder / "recipe").mkdir()
    os.chdir(kit.folder)
    missing = [module for module in ("av", "pyarrow") if find_spec(module) is None]  # datasets, with which demonstrations are read
    failed = []
    for run in list(simulated.RUNS)[:: 12 if kit.tiny else 1]:
        words = simulated.arguments(kit.folder, run, run.replace(" ", "-"))
        demonstrations = simulated.RUNS[run][0] in ("sac", "sft") or any("demonstrations" in word for word in words)
        if missing and demonstrations:
            kit.add(run, f"left out: {', '.join(missing)} missing")
            continue
        code = cli.run([*words, *(["cluster=1gpu"] if kit.device.type == "cuda" else [])])
        finite = False
        if code == 0:
            tensors, _ = simulated.numbers(kit.folder / run.replace(" ", "-"))
            finite = all(bool(value.isfinite().all()) for value in tensors.values())
        kit.add(run, "done, finite weights" if finite else f"**exit code {code}**", "done")
        failed += [] if finite else [run]
    assert not failed, failed


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
