"""Stand-ins of published checkpoints: their repositories' names, files and statistics, and small random weights.

What is assumed of a repository, because it could not be read, is in its ``assumed``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions, OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.training.lora import adapter_state, add_lora, save_adapter
from tools.tiny_checkpoints import write_openvla

ACTION_DIM = 7


@dataclass(frozen=True)
class StandIn:
    """A repository of the Hub that holds a model of seven-dimensional actions, or adapters of one."""

    kind: str
    """openvla, openvla_oft or adapter."""
    norm_stats: tuple[str, ...] = ()
    """Datasets in config.json."""
    statistics: tuple[str, ...] = ()
    """Datasets in dataset_statistics.json."""
    source: str = ""
    assumed: str = ""


STAND_INS = {
    "openvla/openvla-7b": StandIn("openvla", norm_stats=("bridge_orig", "fractal20220817_data"), source="its config.json"),
    "gen-robot/openvla-7b-rlvla-warmup": StandIn(
        "openvla",
        norm_stats=("bridge_orig",),
        statistics=("warmup",),
        source="RL4VLA 55f966d6: openvla/vla-scripts/finetune.py, merge script",
        assumed="that both files are there, and their datasets",
    ),
    "RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main": StandIn(
        "openvla_oft",
        norm_stats=("bridge_orig",),
        source="RLinf a3816b59: examples/embodiment/config/maniskill_ppo_openvlaoft.yaml (unnorm_key)",
        assumed="its files and datasets",
    ),
    "RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Lora": StandIn(
        "adapter",
        source="RLinf a3816b59: examples/embodiment/config/maniskill_ppo_openvlaoft.yaml (lora_path)",
        assumed="a PEFT directory, and the modules that it adapts",
    ),
}


@cache
def files(name: str) -> dict[str, bytes]:
    """What the repository holds, by path."""
    stand_in = STAND_INS[name]
    with TemporaryDirectory() as folder:
        bare, whole = Path(folder) / "bare", Path(folder) / "whole"
        write_openvla(bare, action_dim=ACTION_DIM)
        (statistics,) = json.loads((bare / "dataset_statistics.json").read_text()).values()
        write(bare / "dataset_statistics.json", {"toy": statistics})
        policy: Any = OpenVLAPolicy.load(bare, OpenVLAOptions(random_weights=True))
        if stand_in.kind != "openvla":
            policy = OpenVLAOFTPolicy.load(bare, OpenVLAOFTOptions(random_weights=True, head="discrete", images=["base"], chunk=8))
        if stand_in.kind == "adapter":
            add_lora(policy, LoraOptions(rank=4), seed=0)
            save_adapter(policy.backbone, adapter_state(policy.backbone), whole)
        else:
            whole.mkdir()
            policy.save(whole)
            config = json.loads((whole / "config.json").read_text())
            write(whole / "config.json", config | {"norm_stats": dict.fromkeys(stand_in.norm_stats, statistics)})
            (whole / "dataset_statistics.json").unlink()
            if stand_in.statistics:
                write(whole / "dataset_statistics.json", dict.fromkeys(stand_in.statistics, statistics))
        return {path.relative_to(whole).as_posix(): path.read_bytes() for path in whole.rglob("*") if path.is_file()}


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")
