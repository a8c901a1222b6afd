"""Write the table of docs/gpu.md: which official models fit which GPUs, counted on the meta device.

    python tools/gpu_memory.py

Needs no GPU and no weights: the sizes of the published networks are in the package
(``asset://openvla_7b`` and others). Takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.planner.budget import Setting, budget, choose, least
from rlinf_vla.planner.memory import MemoryModel
from rlinf_vla.runtime import recipes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"


@dataclass(frozen=True)
class Case:
    """A model with the recipe that trains it."""

    name: str
    arguments: tuple[str, ...]


OPENVLA = "model.checkpoint=asset://openvla_7b"
TRAINED = {
    "LoRA r32": ("model.lora.rank=32",),
    "full": ("model.lora.rank=0",),
}
OF_PI0 = ("recipe=libero_ppo_pi0", "model.options.frozen_vlm=false")
CASES = (
    Case("openvla-7b", (OPENVLA, "recipe=maniskill_ppo_putonplate", "model=openvla", "preset=rlinf_ppo_openvla")),
    Case("OFT-7B", (OPENVLA, "recipe=libero_grpo", "model.options.chunk=8", "preset=rlinf_libero_grpo_openvla_oft")),
    Case("π₀", (*OF_PI0, "model.checkpoint=asset://pi0_3b")),
    Case("π₀.₅", (*OF_PI0, "model.checkpoint=asset://pi05_3b")),
)
BEGIN, END = "<!-- written by tools/gpu_memory.py -->", "<!-- end -->"
GPUS = {"1x24": (1, 24), "1x80": (1, 80), "8x80": (8, 80)}


def models(case: Case, trained: tuple[str, ...], gpus: int) -> Iterator[tuple[str, Recipe]]:
    """Yield the ways to place the recipe on ``gpus`` GPUs of a machine, the faster first."""
    shared = ["model.options.dtype=bfloat16", "cluster.micro_batch_size=1", "rollout.batch_size=32"]
    ways = {"": ["cluster=1gpu"]}
    if gpus > 1:
        ray = ["cluster=8gpu", "cluster.runtime=ray", f"cluster.rollout_workers={gpus}", f"cluster.trainer_ranks={gpus}"]
        ways = {"each GPU whole": ray, "sharded": [*ray, "cluster.trainer_sharding=full"]}
    for name, cluster in ways.items():
        arguments = [argument for argument in case.arguments if not (argument.startswith("preset=") and "rank=32" in trained[0])]
        yield name, recipes.read(compose.load("train", [*arguments, *shared, *trained, *cluster]))


def placed(case: Case, trained: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (GPUs, what was chosen for them)."""
    model = MemoryModel(next(models(case, trained, 1))[1])
    for name, (count, gigabytes) in GPUS.items():
        memory, found = gigabytes * 1e9, ""
        for way, model.recipe in models(case, trained, count):
            try:
                setting = choose(model, memory, exact=False)
            except UserError:
                continue
            found = described(way, setting, budget(model, setting, memory, exact=False).peak)
            break
        yield name, found or f"no: {least(model, memory, exact=False).peak / 1e9:.0f} GB with one row"


def described(way: str, setting: Setting, peak: float) -> str:
    parts = [f"**{setting.micro_batch_size}** rows", *([way] if way else [])]
    parts += ["checkpointing"] * setting.gradient_checkpointing + ["off-load"] * setting.offload
    return f"{', '.join(parts)}: {peak / 1e9:.0f} GB"


def main() -> None:
    rows = []
    for name, trained in TRAINED.items():
        for case in CASES:
            cells = dict(placed(case, trained))
            rows.append(f"| {case.name} | {name} | {' | '.join(cells.values())} |")
            print(rows[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    heading = f"| model | training | {' | '.join(f'{name} GB' for name in GPUS)} |\n|---|---|{'---|' * len(GPUS)}"
    table = "\n".join([heading, *rows])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
