"""Write the tables of docs/gpu.md: which official models and presets fit which GPUs.

    python tools/gpu_memory.py [models] [presets]      # both by default

Needs no GPU and no weights: the sizes of the published networks are in the package
(``asset://openvla_7b`` and others). Takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.features.planner.budget import Setting, budget
from rlinf_vla.features.planner.memory import MemoryModel
from rlinf_vla.features.planner.micro_batches import choose, least
from rlinf_vla.runtime import recipes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"


OPENVLA, PI0, PI05 = (
    f"model.checkpoint=asset://{name}" for name in ("openvla_7b", "pi0_3b", "pi05_3b")
)
LORA, FULL = "model.lora.rank=32", "model.lora.rank=0"
OPENVLA_PPO = (OPENVLA, "recipe=maniskill_ppo_putonplate", "model=openvla")
OFT = (OPENVLA, "recipe=libero_grpo", "model.options.chunk=8")
PI0_PPO = ("recipe=libero_ppo_pi0", "model.options.frozen_vlm=false")
MODELS = {
    f"{name} | {trained}": (*keys, key)
    for trained, key in (("LoRA r32", LORA), ("full", FULL))
    for name, keys in {
        "openvla-7b": (*OPENVLA_PPO, *(["preset=rlinf_ppo_openvla"] * (key == FULL))),
        "OFT-7B": (*OFT, *(["preset=rlinf_libero_grpo_openvla_oft"] * (key == FULL))),
        "π₀": (*PI0_PPO, PI0),
        "π₀.₅": (*PI0_PPO, PI05),
    }.items()
}
GRPO = ("recipe=maniskill_grpo", "model.options.prompt_length=null")
PRESETS = {
    "rl4vla": OPENVLA_PPO,
    "rlinf_ppo_openvla": OPENVLA_PPO,
    "rlinf_grpo_openvla": (*GRPO, OPENVLA, "model=openvla"),
    "rlinf_ppo_openvla_oft": (
        OPENVLA,
        "recipe=maniskill_ppo_putonplate",
        "model=openvla_oft",
        "model.options.chunk=8",
    ),
    "rlinf_grpo_openvla_oft": (*GRPO, OPENVLA, "model=openvla_oft", "model.options.chunk=8"),
    "rlinf_libero_grpo_openvla_oft": OFT,
    "simplevla_rl": OFT,
    "pirl_flow_sde": ("recipe=libero_ppo_pi0", PI0),
    "pirl_flow_sde_pi05": ("recipe=libero_ppo_pi0", PI05),
    "pirl_grpo": (
        "recipe=libero_grpo",
        "model=pi0",
        PI0,
        "env.cameras=[base,wrist]",
        "model.options.images=[base,wrist]",
    ),
    "pirl_flow_noise": ("recipe=maniskill_ppo_putonplate", "model=pi0", PI0),
}
"""Preset -> its published recipe, with the official sizes."""
GPUS = {"1x24": (1, 24), "1x80": (1, 80), "8x80": (8, 80)}
TABLES = {"models": "model | training", "presets": "preset"}


def ways(keys: tuple[str, ...], gpus: int) -> Iterator[tuple[str, Recipe]]:
    """Yield the ways to place the recipe on ``gpus`` GPUs of a machine, the faster first."""
    shared = ["model.options.dtype=bfloat16", "cluster.micro_batch_size=1", "rollout.batch_size=32"]
    clusters = {"": ["cluster=1gpu"]}
    if gpus > 1:
        ray = [
            "cluster=8gpu",
            "cluster.runtime=ray",
            f"cluster.rollout_workers={gpus}",
            f"cluster.trainer_ranks={gpus}",
        ]
        clusters = {"each GPU whole": ray, "sharded": [*ray, "cluster.trainer_sharding=full"]}
    for name, cluster in clusters.items():
        yield name, recipes.read(compose.load("train", [*keys, *shared, *cluster]))


def placed(keys: tuple[str, ...]) -> Iterator[str]:
    """Yield what was chosen for each of GPUS."""
    model = MemoryModel(next(ways(keys, 1))[1])
    for count, gigabytes in GPUS.values():
        memory = gigabytes * 1e9
        placement = ""
        for way, model.recipe in ways(keys, count):
            try:
                setting = choose(model, memory, exact=False)
            except UserError:
                continue
            placement = described(way, setting, budget(model, setting, memory, exact=False).peak)
            break
        yield placement or f"no: {least(model, memory, exact=False).peak / 1e9:.0f} GB with one row"


def described(way: str, setting: Setting, peak: float) -> str:
    parts = [f"**{setting.micro_batch_size}** rows", *([way] if way else [])]
    parts += ["checkpointing"] * setting.gradient_checkpointing + ["off-load"] * setting.offload
    return f"{', '.join(parts)}: {peak / 1e9:.0f} GB"


def main() -> None:
    tables = {
        "models": MODELS,
        "presets": {name: (f"preset={name}", *keys) for name, keys in PRESETS.items()},
    }
    for name in sys.argv[1:] or tables:
        heading = f"| {TABLES[name]} | {' | '.join(f'{gpus} GB' for gpus in GPUS)} |"
        rows = [heading, "|---" * (heading.count("|") - 1) + "|"]
        for first, keys in tables[name].items():
            rows.append(f"| {first} | {' | '.join(placed(keys))} |")
            print(rows[-1], flush=True)
        begin = f"<!-- {name}: written by tools/gpu_memory.py -->\n"
        end = f"<!-- end of {name} -->"
        before, _, rest = PAGE.read_text().partition(begin)
        PAGE.write_text(
            "".join([before, begin, *(f"{row}\n" for row in rows), end, rest.partition(end)[2]])
        )


if __name__ == "__main__":
    main()
