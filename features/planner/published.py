"""Profile of a GPU type that nobody has measured: a recipe's counted work at published rates."""

from __future__ import annotations

from dataclasses import asdict

import torch

from rlinf_vla.config.errors import UserError
from rlinf_vla.features.planner.accounting import kernels_of
from rlinf_vla.features.planner.devices import ASSUMED, DEVICES, SIMULATORS, Assumptions, Device
from rlinf_vla.features.planner.memory import FIT_ROWS, MemoryModel
from rlinf_vla.features.planner.profile import GPU, Bytes, Cost, Profile, fit
from rlinf_vla.features.planner.work import counted, counted_step
from rlinf_vla.training.lora import network_dtype

SIZES = (1, 8, 64, 512)
"""Rows at which the duration of a call is computed; a line is fitted through them."""
OPTIMISER_PASSES = 4
"""Times that clipping and Adam read or write a gradient; twice a moment, master and weight."""


class CountedWork:
    """Work of each operation of a recipe, on any device."""

    def __init__(self, model: MemoryModel) -> None:
        """Count it. Raises UserError if the algorithm's loss depends on values."""
        self.model = model
        policy = model.policy
        recipe = model.recipe
        weights = list(policy.parameters())
        low = recipe.cluster.gradient_checkpointing

        few, many = (model.update(rows, low) for rows in FIT_ROWS)
        with kernels_of(model.device):
            batch = model.batch(1)
            forward, both = counted_step(
                lambda: model.loss(model.learner(low), batch), model.learner(low).parameters()
            )
            with torch.no_grad():
                self.calls = {"reference": forward, "update": both} | {
                    "act": counted(lambda: model.act(policy, model.inputs(1)), weights),
                    "value": counted(lambda: policy.value(policy.encode(model.inputs(1))), weights),
                }
                if model.kept:
                    self.calls["precompute"] = counted(
                        lambda: policy.precompute(model.inputs(1)), weights
                    )
        stored = model.weights()
        self.bytes = Bytes(
            weights=stored.all,
            trained=stored.trained,
            low=stored.master / 2,
            activations=(many - few) / (FIT_ROWS[1] - FIT_ROWS[0]),
            call=model.host_bytes_per_call()[0],
            inputs=sum(tensor.nbytes for tensor in model.inputs(1).values()),
        )


def published(work: CountedWork, name: str, cores: int, assumed: Assumptions = ASSUMED) -> Profile:
    """Return the profile of GPU type ``name`` on a machine with ``cores`` cores.

    Raises UserError if the GPU or the recipe's simulator has no published rates, or the recipe no
    time limit of episodes.
    """
    model = work.model
    device = DEVICES.get(name)
    recipe = model.recipe
    if device is None:
        raise UserError(
            f"no rates are published for {name} ({', '.join(DEVICES)}): give profile=FILE, measured on such a machine"
        )
    limit = recipe.env.episode_limit
    if not limit:
        raise UserError(
            "the length of episodes is not known without the simulator: set env.episode_limit"
        )
    return Profile(
        device=name,
        cores=cores,
        operations=_policy(work, device, assumed) | _simulator(model, name, assumed),
        bytes=work.bytes,
        chunk=model.policy.spec.chunk,
        episode_limit=limit,
        rounded=True,
        bus=1e9 * device.bus,
        note=f"PREDICTED from published numbers, not measured: {name}, model {recipe.model.name}, {recipe.env.name}; "
        + ", ".join(f"{key} {value:g}" for key, value in asdict(assumed).items()),
        assumed=True,
    )


def _policy(work: CountedWork, device: Device, assumed: Assumptions) -> dict[str, Cost]:
    model = work.model
    stored = work.model.weights()
    cluster = model.recipe.cluster
    matrix = 1e12 * (
        device.bf16
        if network_dtype(model.policy) == torch.bfloat16
        else device.tf32
        if cluster.tf32
        else device.fp32
    )
    bandwidth = 1e9 * assumed.bandwidth * device.bandwidth
    host = 1e9 * assumed.host * device.host
    costs = {}
    for name, call in work.calls.items():
        share = assumed.training if name == "update" else assumed.inference
        dispatch = (
            0.0
            if name in ("act", "value") and cluster.cuda_graphs
            else assumed.dispatch * call.dispatched
        )
        seconds = [call.seconds(rows, share * matrix, bandwidth) for rows in SIZES]
        costs[name] = Cost(*fit(SIZES, seconds), on=GPU, least=dispatch)
    steps = OPTIMISER_PASSES * stored.gradients + 2 * (
        stored.moments + stored.master + stored.trained
    )
    merging = 2 * stored.merged * (1 / bandwidth + 1 / host)  # to main memory and back
    fixed = {"optimise": steps / bandwidth, "merge": merging, "publish": stored.trained / host}
    return costs | {name: Cost(seconds, on=GPU) for name, seconds in fixed.items()}


def _simulator(model: MemoryModel, device: str, assumed: Assumptions) -> dict[str, Cost]:
    env, spec = model.recipe.env, model.policy.spec
    backend = getattr(env, "backend", "cpu")
    if backend == "auto":
        backend = "gpu"  # the machines have GPUs
    rates = SIMULATORS.get((env.name, backend))
    if rates is None:
        names = ", ".join(f"{name} on {where}" for name, where in SIMULATORS)
        raise UserError(
            f"no rates are published for env={env.name} on {backend} (only {names}): give profile=FILE, measured there"
        )
    pixels = (getattr(env, "image_size", None) or 0) ** 2
    fixed, per_environment = rates.chunk(spec.chunk, len(spec.images), pixels)
    if rates.device == "cpu":
        return {"simulate": Cost(fixed, per_environment), "reset": Cost(per_item=rates.reset)}
    slower = 1.0 if rates.device == device else 1 / assumed.simulation
    return {
        "simulate": Cost(fixed, per_environment, on=GPU).times(slower),
        "reset": Cost(rates.reset, on=GPU).times(slower),
    }
