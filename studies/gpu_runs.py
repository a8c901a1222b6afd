"""Parts of studies/prove_gpu.py that run what exists: the conformance suites, and training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import torch
from gpu_kit import Kit
from prove_gpu import PACKAGES, ROOT

from rlinf_vla.cli import compose
from rlinf_vla.cli import main as cli
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import TakesGPU
from rlinf_vla.core.tasks import EVALUATION_SEEDS
from rlinf_vla.rollout.episodes import numbered_episodes
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.telemetry.metrics import read_metrics


def conformance(kit: Kit) -> None:
    """The tests that every model plug-in inherits; the files of tests in processes side by side."""
    from rlinf_vla.testing.policy import DiscretePolicyConformance, PolicyConformance

    names = [
        name
        for suite in (PolicyConformance, DiscretePolicyConformance)
        for name in vars(suite)
        if name.startswith("test_")
    ]
    models = (
        ["compact"]
        if kit.tiny
        else ["compact", "openvla", "openvla_oft", "pi0", "smolvla", "gr00t"]
    )
    (kit.folder / "pytest.ini").write_text("[pytest]\n")
    # pytest puts the repository first in the path, where rlinf_vla has no plug-ins
    start = f"import sys; sys.path.append({str(PACKAGES)!r}); import pytest, rlinf_vla.models; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", start]
    command += [
        "-q",
        f"-c{kit.folder / 'pytest.ini'}",
        "--noconftest",
        "-pno:cacheprovider",
        "-k",
        " or ".join(names),
    ]
    environment = os.environ | {"RLINF_VLA_TEST_DEVICE": kit.device.type}
    processes = {}
    for model in models:
        words = [
            *command,
            f"--basetemp={kit.folder / model}",
            str(ROOT / "tests" / "models" / f"test_{model}.py"),
        ]
        processes[model] = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=environment
        )
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
    missing = [
        module for module in ("av", "pyarrow") if find_spec(module) is None
    ]  # datasets, with which demonstrations are read
    failed = []
    for run in list(simulated.RUNS)[:: 12 if kit.tiny else 1]:
        words = simulated.arguments(kit.folder, run, run.replace(" ", "-"))
        demonstrations = simulated.RUNS[run][0] in ("sac", "sft") or any(
            "demonstrations" in word for word in words
        )
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


SMALL = [
    "cluster=laptop",
    "env.num_envs=2",
    "rollout.batch_size=1",
    "env.episode_limit=4",
    "algorithm.horizon=8",
]
SMALL += ["algorithm.minibatch_size=4", "algorithm.epochs=1"]


def maniskill(kit: Kit) -> None:
    """The main job, with the simulator on the CPU and on the GPU; one group, and two in turns."""
    codes = []
    for where, num_envs in (("cpu", 16),) if kit.tiny else (("cpu", 16), ("gpu", 64)):
        for depth in (1, 2):
            keys = ("recipe=maniskill_ppo", *on_gpu(num_envs, depth), f"env.backend={where}")
            codes.append(
                train(kit, f"simulator on the {where.upper()}, pipeline depth {depth}", *keys)
            )
    assert not any(codes), f"exit codes {codes}"


def simulators(kit: Kit) -> None:
    """What the budget of a GPU's memory says of simulators there, and what the driver counts."""
    cases = {
        "ManiSkill on the GPU, 64 environments": ("maniskill", "env.num_envs=64", "gpu"),
        "ManiSkill on the GPU, 256 environments": ("maniskill", "env.num_envs=256", "gpu"),
        "ManiSkill on the CPU, 8 processes": ("maniskill", "env.num_envs=8", "cpu"),
    }
    plugin = plugins.envs()["maniskill"]
    assert isinstance(plugin, TakesGPU)
    for name, (recipe_of, number, backend) in cases.items():
        if kit.tiny and backend == "gpu":
            continue
        keys = [f"recipe={recipe_of}_ppo", "cluster=laptop", number, f"env.backend={backend}"]
        recipe = recipes.read(compose.load("train", [*keys, "env.processes=8"]))
        estimated = plugin.gpu_bytes(recipe.env, recipe.env.num_envs, recipe.env.processes)
        before = free_bytes(kit)
        with builders.open_envs(recipe, None, 1) as (env,):
            env.reset(
                numbered_episodes(EVALUATION_SEEDS, 0, recipe.env.num_envs, len(env.spec.tasks))
            )
            taken = before - free_bytes(kit)
        kit.add(name, f"{taken / 1e9:.2f} GB", f"{estimated / 1e9:.2f} GB estimated")


def free_bytes(kit: Kit) -> float:
    return torch.cuda.mem_get_info(kit.device)[0] if kit.device.type == "cuda" else 0.0


def workers(kit: Kit) -> None:
    """PPO on Ray; with two GPUs, trainer ranks and broadcasts of weights over NCCL."""
    ray = ("recipe=maniskill_ppo", "cluster.runtime=ray", "env.backend=cpu")
    on_ray = ray if kit.tiny else (*ray, *on_gpu(16, 1), "cluster.start_timeout_s=120")
    turns = ("cluster.offload=true",) if kit.device.type == "cuda" else ()
    codes = [train(kit, "roles in turns", *on_ray, *turns)]
    gpus = torch.cuda.device_count()
    if gpus < 2:
        kit.add("two trainer ranks, and broadcasts", f"left out: {gpus} GPUs")
    else:
        two = ("cluster.trainer_ranks=2", "cluster.rollout_workers=2", "cluster.weights=broadcast")
        codes.append(train(kit, "two ranks and broadcasts over NCCL", *on_ray, *two))
    assert not any(codes), f"exit codes {codes}"


def genesis(kit: Kit) -> None:
    """PPO with the simulator on the GPU; one group, and two in turns. Then environments alone."""
    start = (
        "recipe=genesis_ppo",
        f"model.checkpoint={ROOT / 'assets' / 'openvla_tiny'}",
        "model.options.random_weights=true",
    )
    backend = f"env.backend={'cpu' if kit.tiny else 'gpu'}"
    codes = [
        train(kit, f"pipeline depth {depth}", *start, *on_gpu(64, depth), backend)
        for depth in ((1,) if kit.tiny else (1, 2))
    ]
    for num_envs in (2,) if kit.tiny else (64, 1024, 4096):
        folder = kit.folder / str(num_envs)
        limit = f"env.episode_limit={4 if kit.tiny else 30}"
        keys = (
            "env=genesis",
            backend,
            f"env.num_envs={num_envs}",
            "env.cameras=[]",
            limit,
            f"run_dir={folder}",
        )
        codes.append(cli.run(["bench", "env", *keys]))
        for row in json.loads((folder / "bench_env.json").read_text())["genesis"]["measured"]:
            name = f"{num_envs} environments, nothing rendered, {row['name']}, {row['images']}"
            kit.add(name, f"{row['steps'] / row['seconds']:.0f} steps/s")
    assert not any(codes), f"exit codes {codes}"


def large(kit: Kit) -> None:
    """openvla-7b with LoRA r32 on ManiSkill's CPU simulator, under the plan of the planner."""
    network = [
        "model.options.unnorm_key=libero",
        "model.lora.rank=32",
        "env.image_size=224",
        "env.control_mode=pd_ee_delta_pose",
    ]
    network += [
        f"model.checkpoint={ROOT / 'assets' / 'openvla_7b'}",
        "model.options.random_weights=true",
        "model.options.dtype=bfloat16",
    ]
    keys = (
        *on_gpu(16, 1),
        *network,
        "cluster.plan=auto",
        "algorithm.epochs=1",
        "algorithm.horizon=30",
        "algorithm.value_warmup=0",
    )
    code = train(kit, "openvla-7b", "recipe=maniskill_ppo", *([] if kit.tiny else keys))
    assert code == 0, f"exit code {code}"


def on_gpu(num_envs: int, depth: int) -> list[str]:
    return [
        "cluster=1gpu",
        f"env.num_envs={num_envs}",
        f"rollout.batch_size={num_envs // depth}",
        f"rollout.pipeline_depth={depth}",
    ]


def train(kit: Kit, name: str, *keys: str) -> int:
    """Train for two iterations, and add a row for each, or the exit code, which is returned."""
    run = kit.folder / f"run-{len(kit.rows)}"
    words = [
        "train",
        *keys,
        "iterations=2",
        "evaluation.before_and_after=false",
        f"run_dir={run}",
    ]
    code = cli.run([*words, *(SMALL if kit.tiny else ())])
    if code:
        kit.add(name, f"**exit code {code}**", "done")
        return code
    for row in read_metrics(run):
        values = {key: value for key, value in row.items() if any(word in key for word in SHOWN)}
        kit.add(
            f"{name}, iteration {row['step']}",
            ", ".join(f"{key} {value:.4g}" for key, value in values.items()),
        )
    return code


SHOWN = ("steps_per_s", "grad_norm", "success_once", "timing_s", "plan/")
