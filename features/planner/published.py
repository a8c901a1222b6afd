"""Profile of a GPU type that nobody has measured: a recipe's counted work at published rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from rlinf_vla.config.cluster import CUDA, NodeConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.core.protocols import HasBackends, HasOutline
from rlinf_vla.features.planner.accounting import kernels_of
from rlinf_vla.features.planner.devices import ASSUMED, DEVICES, SIMULATORS, Assumptions, Device
from rlinf_vla.features.planner.measure_rollout import measure_simulator
from rlinf_vla.features.planner.memory import FIT_ROWS, MemoryModel
from rlinf_vla.features.planner.profile import CPU, GPU, Bytes, Cost, Profile, fit
from rlinf_vla.features.planner.rates import measured_rates
from rlinf_vla.features.planner.work import counted, counted_step
from rlinf_vla.runtime.fit import fitted
from rlinf_vla.runtime.machines import gpu_type
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


@dataclass(frozen=True)
class Simulation:
    """Costs of a recipe's simulator: of one chunk and one reset.

    ``episode_limit``: control steps. ``remark``: where the costs are from, unless published.
    """

    costs: Mapping[str, Cost]
    episode_limit: int
    remark: str | None = None


def published(
    work: CountedWork,
    node: NodeConfig,
    simulation: Simulation,
    rates: Device,
    assumed: Assumptions = ASSUMED,
) -> Profile:
    """Return the profile of a machine like ``node``, whose GPUs have these ``rates``."""
    model = work.model
    recipe = model.recipe
    name = node.device
    remark = "" if simulation.remark is None else f"; {simulation.remark}"
    return Profile(
        device=name,
        cores=node.cpus,
        operations=_policy(work, rates, assumed) | dict(simulation.costs),
        bytes=work.bytes,
        chunk=model.policy.spec.chunk,
        episode_limit=simulation.episode_limit,
        rounded=True,
        bus=1e9 * rates.bus,
        note=f"PREDICTED from published numbers, not measured: {name}, model {recipe.model.name}, {recipe.env.name}; "
        + ", ".join(f"{key} {value:g}" for key, value in asdict(assumed).items())
        + remark,
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


def simulation_of(
    model: MemoryModel, node: NodeConfig, assumed: Assumptions = ASSUMED
) -> Simulation | None:
    """Return the published costs of the recipe's simulator on a machine like ``node``.

    None if there are none, or if only the simulator knows how long its episodes are. Raises
    UserError if ``env.backend=gpu`` is not possible.
    """
    spec = model.policy.spec
    env = fitted(model.recipe.env, spec)
    plugin = plugins.choose("env", env.name, plugins.envs())
    backend = plugin.backend(env, here=False) if isinstance(plugin, HasBackends) else CPU
    rates = SIMULATORS.get((env.name, backend))
    limit = env.episode_limit
    if limit is None and isinstance(plugin, HasOutline):
        outline = plugin.outline(env)
        limit = None if outline is None else outline.episode_limit
    if rates is None or limit is None:
        return None
    pixels = (getattr(env, "image_size", None) or 0) ** 2
    fixed, per_environment = rates.chunk(spec.chunk, len(spec.images), pixels)
    costs = {"simulate": Cost(fixed, per_environment), "reset": Cost(per_item=rates.reset)}
    if backend == GPU:
        slower = 1.0 if rates.device == node.device else 1 / assumed.simulation
        costs = {
            "simulate": Cost(fixed, per_environment, on=GPU).times(slower),
            "reset": Cost(rates.reset, on=GPU).times(slower),
        }
    return Simulation(costs, limit)


def measured_simulation(model: MemoryModel) -> Simulation:
    """Measure the recipe's simulator on this machine. Raises UserError if it cannot run here."""
    recipe = model.recipe
    try:
        costs, limit, on_gpu = measure_simulator(recipe, model.policy.spec)
    except UserError as error:
        raise UserError(
            f"no rates are published for env={recipe.env.name}, and it cannot be measured here: {error}; or give profile=FILE"
        ) from error
    where = "GPU" if on_gpu else "CPU"
    remark = f"{recipe.env.name} measured with a few environments on this machine's {where}"
    return Simulation(costs, limit, remark)


def rates_of(node: NodeConfig) -> tuple[Device, str | None]:
    """Return the rates of the GPUs of ``node``, and a remark if they are not published.

    Those of a GPU like this machine's are measured, in seconds. Of another, they are taken from
    the published GPU with the most similar memory.
    """
    if node.device in DEVICES:
        return DEVICES[node.device], None
    gpu = torch.device(CUDA)
    if torch.cuda.is_available() and gpu_type(torch.cuda.get_device_name(gpu)) == node.device:
        return measured_rates(gpu, node), f"rates of {node.device} measured on this machine"
    like = min(DEVICES, key=lambda name: abs(DEVICES[name].memory - node.gpu_memory_gb))
    return DEVICES[
        like
    ], f"no rates are published for {node.device}: those of {like} are taken (or give profile=FILE)"
