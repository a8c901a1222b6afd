"""The parts of studies/prove_gpu.py: python studies/gpu_parts.py PART DEVICE SIZE SECONDS FILE

Each measures one thing and adds rows to FILE. The networks have the official sizes, or those of the
packaged tiny models, and random weights.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from prove_gpu import PACKAGES

sys.path.append(str(PACKAGES))  # at the end: the machine's own packages come first

import numpy as np
from gpu_kit import MODELS, Kit, said
from gpu_profile import costs
from gpu_runs import conformance, genesis, large, maniskill, rehearsal, simulators, workers
from gpu_tails import tails

from rlinf_vla.benchmarks import policy as bench_policy
from rlinf_vla.benchmarks.roofline import limits_of
from rlinf_vla.benchmarks.update_on_policy import MINIBATCHES, model_work
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core.devices import set_fused_kernels, synchronise, threads
from rlinf_vla.core.images import through_jpeg
from rlinf_vla.core.protocols import Policy, prepared
from rlinf_vla.core.types import Episodes
from rlinf_vla.envs import mujoco_gl
from rlinf_vla.features.planner import rates as rates_of_devices
from rlinf_vla.features.planner.devices import DEVICES
from rlinf_vla.features.planner.memory import MemoryModel, weights_of
from rlinf_vla.features.planner.synthetic import observation, synthetic_batch, with_frozen_weights
from rlinf_vla.rollout.actor import Actor, Settings
from rlinf_vla.runtime import builders
from rlinf_vla.runtime.machines import this_machine
from rlinf_vla.runtime.workers.trainer import OnPolicyUpdater
from rlinf_vla.telemetry.measurement import peak_growth, time_interleaved
from rlinf_vla.training.gradient_checkpointing import checkpoint_blocks
from rlinf_vla.training.lora import merged_lora, network_dtype

TIMES_GENERATE, ROOFLINE, UPDATE_MFU = 3.0, 0.6, 0.5
FUSED = 1e-3
"""Largest relative error that fused kernels may make in float32."""
P999_MS = {"openvla": 60.0, "oft": 30.0, "pi0": 25.0}
ROWS = (32, 16, 8, 4, 2, 1)
"""Rows of a micro-batch, of which the first that fits into the memory is taken."""


def policy_calls(model: str, kit: Kit) -> None:
    """Policy calls at batch 1 and 64, beside the usual implementation; and one control step."""
    recipe = kit.recipe(model, "model.lora.rank=0", "rollout.temperature=1.0")
    policy = kit.policy(recipe)
    limits = limits_of(kit.device, network_dtype(policy))
    kit.add("limits of the device", limits.described())
    if kit.tiny:
        bench_policy.WARMUP = 1
        bench_policy.CALLS = 2
    bench_policy.SECONDS = kit.seconds
    for batch in (1, 4 if kit.tiny else 64):
        obs = observation(policy.spec, batch)
        latencies, same = bench_policy.measure(policy, obs, 1.0, True, limits, updates=False)
        by_kind = {latency.kind: latency for latency in latencies}
        for kind, latency in by_kind.items():
            kit.add(
                f"batch {batch}, {NAMES.get((model, kind), kind)}: p50, p99, actions/s, MFU",
                f"{latency.p50_ms:.1f} ms, {latency.p99_ms:.1f} ms, {latency.actions_per_s:.0f}, {100 * latency.reached.mfu:.1f} %",
            )
        large = model == "openvla" and batch > 1
        share = 100 * by_kind["act"].reached.of_roofline
        kit.add(
            f"batch {batch}, act: share of the roofline",
            *said(share, " %", 100 * ROOFLINE if large else None),
        )
        if "plain" in by_kind:
            times = by_kind["plain"].p50_ms / by_kind["act"].p50_ms
            kit.add(
                f"batch {batch}, act: times as fast as the usual implementation",
                *said(times, "", TIMES_GENERATE if large else None),
            )
            kit.add(f"batch {batch}, the same actions in", f"{100 * (same or 0):.1f} %")
    control_step(model, policy, kit)


NAMES = {
    ("openvla", "plain"): "transformers' `generate`, same weights and embeddings",
    ("pi0", "plain"): "prefix at every step",
}


def control_step(model: str, policy: Policy, kit: Kit) -> None:
    """From an observation in the CPU's memory to actions there."""
    actor = Actor(policy, Settings(0, 0.0, 1))
    obs = observation(policy.spec, 1)
    zero = torch.zeros(1, dtype=torch.int64)
    calls = 5 if kit.tiny else 3000
    episodes = Episodes(zero, zero, zero)
    step = partial(lambda: actor.act(actor.prepare(obs), episodes, zero))
    times = 1e3 * np.array(time_interleaved({"it": step}, kit.device, calls, 5, kit.seconds)["it"])
    kit.add(
        f"one observation to actions: p50 of {len(times)}",
        *said(float(np.quantile(times, 0.5)), " ms"),
    )
    worst = float(np.quantile(times, 0.999))
    kit.add(
        f"one observation to actions: p99.9 of {len(times)}",
        *said(worst, " ms", P999_MS.get(model), least=False),
    )


def capture(kit: Kit) -> None:
    """Acting and valuing by CUDA graphs: bits as without, also after the weights changed."""
    for model in MODELS:
        policy = kit.policy(kit.recipe(model, "model.lora.rank=0"))
        numbers = torch.arange(2)
        episodes = Episodes(numbers, numbers, 0 * numbers)
        step = numbers
        for temperature in (0.0, 1.0):
            plain, graphed = (
                Actor(policy, Settings(0, temperature, 2, graphs)) for graphs in (False, True)
            )
            same = []
            for change in range(2):
                inputs = plain.prepare(observation(policy.spec, 2))
                with torch.no_grad():
                    next(policy.value_head.parameters()).add_(change)
                    next(policy.backbone.parameters()).mul_(1 + change)
                one, other = (actor.act(inputs, episodes, step) for actor in (plain, graphed))
                same += [
                    torch.equal(getattr(one, name), getattr(other, name))
                    for name in ("actions", "log_prob", "value")
                ]
                same += [torch.equal(plain.values(inputs), graphed.values(inputs))]
            kit.add(
                f"{model}, temperature {temperature:g}",
                "the same bits" if all(same) else "**other bits**",
                "the same bits",
            )
        del policy, plain, graphed
        torch.cuda.empty_cache()


def fused(kit: Kit) -> None:
    """Fused kernels beside PyTorch's operations, of tiny models in float32, with gradients."""
    small = Kit(kit.device.type, "tiny", kit.seconds, kit.file, kit.folder)
    for model in MODELS:
        policy = small.policy(small.recipe(model, "model.lora.rank=0"))
        inputs = prepared(policy, observation(policy.spec, 3))
        with torch.no_grad():
            latent = policy.act(policy.encode(inputs), None, 0.0).latent
        results = []
        for enabled in (False, True):
            set_fused_kernels(enabled)
            policy.zero_grad(set_to_none=True)
            outcome = policy.evaluate(inputs, latent, 1.0)
            (outcome.log_prob.sum() + outcome.value.sum()).backward()
            gradients = torch.cat(
                [
                    (
                        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    ).flatten()
                    for parameter in policy.parameters()
                ]
            )
            results.append((outcome.log_prob.detach(), gradients))
        (log_prob, gradient), (fused_log_prob, fused_gradient) = results
        apart = ((fused_gradient - gradient).norm() / gradient.norm()).item()
        off = ((fused_log_prob - log_prob).abs() / (1 + log_prob.abs())).max().item()
        kit.add(
            model,
            f"log-probabilities within {off:.1e}, gradients within {apart:.1e}",
            f"< {FUSED:g}: {'met' if max(off, apart) < FUSED else 'missed'}",
        )
        assert max(off, apart) < FUSED


def profiles(kit: Kit) -> None:
    """Kernels of policy calls, and of an update."""

    def act(policy: Policy, name: str, batch: int) -> None:
        numbers = torch.arange(batch)
        actor = Actor(policy, Settings(0, 0.0, batch))
        inputs = actor.prepare(observation(policy.spec, batch))
        costs(
            kit,
            f"{name}, batch {batch}",
            lambda: actor.act(inputs, Episodes.first_attempts(0 * numbers, numbers), numbers),
        )

    for model in ("pi0", "openvla"):
        policy = kit.policy(kit.recipe(model, "model.lora.rank=0"))
        for batch in (1, 4 if kit.tiny else 64):
            act(policy, f"{model}, act", batch)
        del policy
        torch.cuda.empty_cache()
    rows = 1 if kit.tiny else 8
    call = updating(kit, kit.policy(kit.recipe("openvla", *LORA)), rows)
    costs(kit, f"openvla, an update of {MINIBATCHES} micro-batches of {rows}", call)


def update(kit: Kit) -> None:
    """Seconds and FLOPs of updates with LoRA, without and with gradient checkpointing."""
    policy = kit.policy(kit.recipe("openvla", *LORA))
    limits = limits_of(kit.device, network_dtype(policy))
    kit.add("limits of the device", limits.described())
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_blocks(policy)
        rows, seconds = largest(kit, partial(timed_update, kit, policy))
        work = model_work(of_rows(kit, rows))
        assert work is not None
        reached = limits.reached(work, seconds)
        name = f"{'with' if checkpointing else 'without'} gradient checkpointing, micro-batches of {rows}"
        kit.add(f"{name}: policy calls/s", f"{MINIBATCHES * rows / seconds:.2f}{kit.peak}")
        kit.add(
            f"{name}: MFU",
            *said(100 * reached.mfu, " %", None if checkpointing else 100 * UPDATE_MFU),
        )
        kit.add(f"{name}: share of the roofline", *said(100 * reached.of_roofline, " %"))


LORA = (
    "model.lora.rank=32",
    "algorithm.epochs=1",
    "cluster.cuda_graphs=false",
    "rollout.batch_size=4",
    "rollout.pipeline_depth=1",
)


def of_rows(kit: Kit, rows: int) -> Recipe:
    sizes = (f"algorithm.minibatch_size={rows}", f"cluster.micro_batch_size={rows}")
    return with_frozen_weights(kit.recipe("openvla", *LORA, *sizes))


def largest(kit: Kit, call: Callable[[int], float]) -> tuple[int, float]:
    """Return the most rows with which ``call`` does not run out of memory, and what it returns."""
    for rows in ROWS[-2:] if kit.tiny else ROWS:
        try:
            return rows, call(rows)
        except torch.OutOfMemoryError:
            print(f"{rows} rows do not fit")
        torch.cuda.empty_cache()
    raise MemoryError("one row does not fit into the memory of this GPU")


def timed_update(kit: Kit, policy: Policy, rows: int) -> float:
    """Return the best seconds of an update of ``MINIBATCHES`` minibatches, each in one piece."""
    if kit.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    call = updating(kit, policy, rows)
    return min(time_interleaved({"it": call}, kit.device, 1 if kit.tiny else 4, 1)["it"])


def updating(kit: Kit, policy: Policy, rows: int) -> Callable[[], object]:
    """Return an update of ``MINIBATCHES`` minibatches, each in one piece."""
    policy.zero_grad(set_to_none=True)
    recipe = of_rows(kit, rows)
    algorithm = builders.build_algorithm(recipe)
    batch = synthetic_batch(recipe, policy, algorithm, MINIBATCHES * rows)
    settings = builders.actor_settings(recipe, recipe.rollout.temperature)
    trainer = builders.build_trainer(recipe, policy)
    updater = OnPolicyUpdater(trainer, settings.run_seed, settings.temperature, True)
    return lambda: updater.update(batch, algorithm, False, 0, 0)


def memory(kit: Kit) -> None:
    """What the planner counts, beside what PyTorch allocated at most."""
    recipe = of_rows(kit, 2 if kit.tiny else 4)
    rows, calls = recipe.cluster.rows, recipe.rollout.batch_size
    model = MemoryModel(recipe)
    policy = kit.policy(recipe)
    weights = weights_of(model.policy)
    batch = synthetic_batch(recipe, policy, model.algorithm, rows).to(kit.device)
    actor = Actor(policy, replace(builders.actor_settings(recipe, 1.0), cuda_graphs=False))
    numbers = torch.arange(calls)
    inputs = actor.prepare(observation(policy.spec, calls))
    if kit.device.type == "cuda":
        kit.add(
            "weights",
            *compared(
                weights.all,
                sum(tensor.nbytes for tensor in (*policy.parameters(), *policy.buffers())),
            ),
        )

    def act() -> None:
        actor.act(inputs, Episodes.first_attempts(0 * numbers, numbers), numbers)

    def learn() -> None:
        model.algorithm.loss(policy, batch, False)[0].backward()

    for name, call, counted in (
        (f"policy call of {calls} rows", act, lambda: model.rollout(calls)),
        (f"micro-batch of {rows} rows", learn, lambda: model.update(rows, False)),
        (
            f"micro-batch of {rows} rows, gradient checkpointing",
            learn,
            lambda: model.update(rows, True),
        ),
    ):
        if "checkpointing" in name:
            checkpoint_blocks(policy)
        call()  # the first also counts what libraries, and gradients, allocate once
        kit.add(name, *compared(counted(), peak_growth(call, kit.device)))


def compared(counted: float, measured: float) -> tuple[str, str]:
    return (
        f"{measured / 1e9:.3f} GB",
        f"counted: {counted / 1e9:.3f} GB, {counted / max(measured, 1):.2f} of it",
    )


def finetune(kit: Kit) -> None:
    """One update of all weights of π₀ in bfloat16, with gradient checkpointing."""
    keys = (
        "model.lora.rank=0",
        "algorithm.epochs=1",
        "algorithm.minibatch_size=1",
        "algorithm.learning_rate=1e-3",
    )
    more = (
        "algorithm.value_warmup=0",
        "rollout.batch_size=1",
        "rollout.pipeline_depth=1",
        "cluster.cuda_graphs=false",
    )
    recipe = kit.recipe("pi0", *keys, *more, "model.options.dtype=bfloat16")
    recipe = replace(recipe, cluster=replace(recipe.cluster, gradient_checkpointing=True))
    policy, algorithm = kit.policy(recipe), builders.build_algorithm(recipe)
    before = {
        name: weight.detach().to("cpu", copy=True)
        for name, weight in policy.backbone.named_parameters()
    }
    batch = synthetic_batch(recipe, policy, algorithm, 1)
    trainer = builders.build_trainer(recipe, policy)
    updater = OnPolicyUpdater(trainer, recipe.seed, recipe.rollout.temperature, True)
    metrics = updater.update(batch, algorithm, False, 0, 0)
    weights = {name: weight.detach().cpu() for name, weight in policy.backbone.named_parameters()}
    changed = sum(not torch.equal(weights[name], value) for name, value in before.items())
    finite = all(bool(value.isfinite().all()) for value in weights.values())
    kit.add(
        "weights",
        f"{changed} of {len(before)} tensors changed, {'all finite' if finite else '**not finite**'}{kit.peak}",
    )
    kit.add("gradient norm", f"{metrics['actor/grad_norm']:.4g}")
    assert changed and finite


def rendering(kit: Kit) -> None:
    """Whether MuJoCo's simulators can render on the policy's GPU while CUDA computes there."""
    for backend in mujoco_gl.BACKENDS:
        probed = mujoco_gl.renderer(backend, None)
        if probed is None:
            kit.add(backend, "does not work here")
            continue
        name, devices = probed
        numbers = ", ".join(
            f"{number} is CUDA's {'–' if cuda is None else cuda}"
            for number, cuda in enumerate(devices)
        )
        kit.add(backend, f"{name}; EGL's devices: {numbers}" if devices else name)
    if (probed := mujoco_gl.renderer("egl", None)) is not None:
        name, devices = probed
        found = mujoco_gl.Renderer("egl", name, mujoco_gl.device_for(devices, os.environ))
        for processes in (1, 2) if kit.tiny else (1, 2, mujoco_gl.MOST_AT_ONCE):
            began = time.perf_counter()
            works = mujoco_gl.works_at_once(found, None, processes)
            verdict = "works" if works else "**hangs or aborts**"
            kit.add(
                f"{processes} processes of 100 pictures beside products of matrices",
                f"{verdict}, {time.perf_counter() - began:.1f} s",
            )
    chosen = mujoco_gl.find("auto", None, processes=mujoco_gl.MOST_AT_ONCE)
    kit.add("env.renderer=auto takes", f"{chosen.backend}: {chosen.name}, device {chosen.device}")


def rates(kit: Kit) -> None:
    """The rates that a plan rests on where none are published."""
    if kit.tiny:
        rates_of_devices.SIZES = {"cpu": (64, 1 << 16)}
    node = this_machine(kit.device.type)
    measured = asdict(rates_of_devices.measured_rates(kit.device, node))
    known = DEVICES.get(node.device)
    for name, value in measured.items():
        peak = "not published" if known is None else f"{getattr(known, name):.4g} published"
        kit.add(name, f"{value:.4g}", peak)


def merging(kit: Kit) -> None:
    """The first merge copies the weights to main memory; later ones need not."""
    recipe = kit.recipe("openvla", "model.lora.rank=32")
    policy = kit.policy(recipe)
    for number in range(3):
        synchronise(kit.device)
        began = time.perf_counter()
        with merged_lora(policy):
            synchronise(kit.device)
            merged = time.perf_counter()
        synchronise(kit.device)
        restored = time.perf_counter()
        kit.add(
            f"merge {number + 1}: merged, restored",
            f"{merged - began:.2f} s, {restored - merged:.2f} s",
        )
    images = torch.randint(256, (4 if kit.tiny else 64, 224, 224, 3), dtype=torch.uint8)
    began = time.perf_counter()
    through_jpeg(images.to(kit.device))
    kit.add(f"{len(images)} pictures through JPEG", f"{time.perf_counter() - began:.3f} s")


PARTS: dict[str, Callable[[Kit], None]] = {
    **{model: partial(policy_calls, model) for model in MODELS},
    **{part.__name__: part for part in (tails, capture, fused, update, profiles, memory)},
    **{part.__name__: part for part in (finetune, rendering, rates, merging)},
    **{part.__name__: part for part in (simulators, workers)},
    **{part.__name__: part for part in (conformance, rehearsal, maniskill, genesis, large)},
}


def main(part: str, device: str, size: str, seconds: str, file: str) -> None:
    with tempfile.TemporaryDirectory(dir=Path(file).parent) as folder, threads(None):
        torch.manual_seed(0)
        PARTS[part](Kit(device, size, float(seconds), Path(file), Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
