"""Write the table of docs/gpu.md: which official models fit which GPUs, counted on the meta device.

    python tools/gpu_memory.py

Needs no GPU and no weights: the sizes of the four networks are below, as their published
config.json has them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_vla.cli import compose
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.planner.budget import Setting, budget, choose
from rlinf_vla.planner.memory import MemoryModel
from rlinf_vla.runtime import recipes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
STATISTICS = {name: [value] for name, value in (("q01", -1.0), ("q99", 1.0), ("mean", 0.0), ("std", 1.0))}
OPENVLA = {
    "arch_specifier": "no-align+fused-gelu-mlp",
    "hf_llm_id": "meta-llama/Llama-2-7b-hf",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "llm_max_length": 2048,
    "model_type": "openvla",
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "use_fused_vision_backbone": True,
    "vision_backbone_id": "dinosiglip-vit-so-224px",
}
"""openvla-7b; what is absent has the defaults of Llama 2 7B."""
PI0 = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "action_dim": 32, "bos_token_id": 1}


@dataclass(frozen=True)
class Case:
    """A model with the recipe that trains it."""

    name: str
    config: dict[str, Any]
    arguments: tuple[str, ...]


TRAINED = {
    "LoRA r32": ("model.lora.rank=32",),
    "full": ("model.lora.rank=0",),
}
OF_PI0 = ("recipe=libero_ppo_pi0", "model.options.frozen_vlm=false")
CASES = (
    Case("openvla-7b", OPENVLA, ("recipe=maniskill_ppo_putonplate", "model=openvla", "preset=rlinf_ppo_openvla")),
    Case("OFT-7B", OPENVLA, ("recipe=libero_grpo", "model.options.chunk=8", "preset=rlinf_libero_grpo_openvla_oft")),
    Case("π₀", PI0 | {"action_horizon": 50}, OF_PI0),
    Case("π₀.₅", PI0 | {"action_horizon": 10, "pi05": True}, (*OF_PI0, "model.options.prompt_length=200")),
)
BEGIN, END = "<!-- written by tools/gpu_memory.py -->", "<!-- end -->"
GPUS = {"1x24": (1, 24), "1x80": (1, 80), "8x80": (8, 80)}


def directory_of(case: Case, parent: Path) -> Path:
    """Write the files from which a policy is built without weights."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    seven, eight = ({key: value * count for key, value in STATISTICS.items()} for count in (7, 8))
    config = dict(case.config)
    if config is not None and "text_config" in config:
        config["norm_stats"] = {"libero": {"action": seven, "proprio": eight}}
    else:
        (directory / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": eight, "actions": seven}}))
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copyfile(ROOT / "assets" / "openvla_tiny" / "tokenizer.json", directory / "tokenizer.json")
    return directory


def models(case: Case, trained: tuple[str, ...], gpus: int, directory: Path) -> Iterator[tuple[str, Recipe]]:
    """Yield the ways to place the recipe on ``gpus`` GPUs of a machine, the faster first."""
    shared = [f"model.checkpoint={directory}", "model.options.dtype=bfloat16", "cluster.micro_batch_size=1", "rollout.batch_size=32"]
    ways = {"": ["cluster=1gpu"]}
    if gpus > 1:
        ray = ["cluster=8gpu", "cluster.runtime=ray", f"cluster.rollout_workers={gpus}", f"cluster.trainer_ranks={gpus}"]
        ways = {"each GPU whole": ray, "sharded": [*ray, "cluster.trainer_sharding=full"]}
    for name, cluster in ways.items():
        arguments = [argument for argument in case.arguments if not (argument.startswith("preset=") and "rank=32" in trained[0])]
        yield name, recipes.read(compose.load("train", [*arguments, *shared, *trained, *cluster]))


def placed(case: Case, trained: tuple[str, ...], directory: Path) -> Iterator[tuple[str, str]]:
    """Yield (GPUs, what was chosen for them)."""
    model = MemoryModel(next(models(case, trained, 1, directory))[1])
    for name, (count, gigabytes) in GPUS.items():
        memory, found = gigabytes * 1e9, ""
        for way, model.recipe in models(case, trained, count, directory):
            try:
                setting = choose(model, memory, exact=False)
            except UserError:
                continue
            found = described(way, setting, budget(model, setting, memory, exact=False).peak)
            break
        yield name, found or f"no: {least(model, memory) / 1e9:.0f} GB with one row"


def described(way: str, setting: Setting, peak: float) -> str:
    parts = [f"**{setting.micro_batch_size}** rows", *([way] if way else [])]
    parts += ["checkpointing"] * setting.gradient_checkpointing + ["off-load"] * setting.offload
    return f"{', '.join(parts)}: {peak / 1e9:.0f} GB"


def least(model: MemoryModel, memory: float) -> float:
    return budget(model, Setting(1, 1, True, model.recipe.cluster.runtime == "ray"), memory, exact=False).peak


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        directories = {case.name: directory_of(case, Path(folder)) for case in CASES}
        for name, trained in TRAINED.items():
            for case in CASES:
                directory = directories[case.name]
                cells = dict(placed(case, trained, directory))
                rows.append(f"| {case.name} | {name} | {' | '.join(cells.values())} |")
                print(rows[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    heading = f"| model | training | {' | '.join(f'{name} GB' for name in GPUS)} |\n|---|---|{'---|' * len(GPUS)}"
    table = "\n".join([heading, *rows])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
