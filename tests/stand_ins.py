"""Stand-ins of published checkpoints: their repositories' names, files and statistics, and small random weights.

What is assumed of a repository, because it could not be read, is in its ``assumed``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlinf_vla.config.recipe import LoraOptions
from rlinf_vla.models.files import WEIGHTS, read_safetensors, write_safetensors
from rlinf_vla.models.openvla.oft import OpenVLAOFTPolicy
from rlinf_vla.models.openvla.options import OpenVLAOFTOptions, OpenVLAOptions
from rlinf_vla.models.openvla.policy import OpenVLAPolicy
from rlinf_vla.models.pi0.options import Pi0Options
from rlinf_vla.models.pi0.policy import Pi0Policy
from rlinf_vla.training.lora import adapter_state, add_lora, save_adapter
from tools.tiny_checkpoints import unit_statistics, write_openvla, write_pi0, write_processors

ACTION_DIM = 7
STATISTICS = "dataset_statistics.json"
NORM_STATS = "norm_stats.json"
TOKENIZER = "tokenizer.json"
OURS = (
    "chunk",
    "center_crop",
    "resize",
    "gripper",
    "bounds",
    "oft",
    "card",
    "action_horizon",
    "delta_mask",
    "pi05",
)
"""Keys of config.json that only this package writes."""


@dataclass(frozen=True)
class StandIn:
    """A repository of the Hub that holds a model of seven-dimensional actions, or a part of one."""

    kind: str
    """A key of ``WRITERS``."""
    datasets: tuple[str, ...] = ()
    """Of the statistics in config.json (OpenVLA), or the folder of norm_stats.json (π)."""
    own: tuple[str, ...] = ()
    """Datasets in dataset_statistics.json."""
    source: str = ""
    assumed: str = ""


def libero_oft(*own: str) -> StandIn:
    return StandIn(
        "openvla_oft",
        ("bridge_orig",),
        own,
        source="RLinf a0048e85: examples/embodiment/config/libero_*_grpo_openvlaoft.yaml (unnorm_key)",
        assumed="that both files of statistics are there, and the datasets of the base model",
    )


def pi(kind: str, folder: str) -> StandIn:
    return StandIn(
        kind,
        (f"physical-intelligence/{folder}",),
        source="RLinf a3816b59: rlinf/models/embodiment/openpi/dataconfig",
        assumed="model.safetensors and config.json of openpi's PyTorch layout, statistics in this folder, no tokenizer",
    )


def lerobot(
    kind: str, source: str, assumed: str = "its files, and quantiles among its statistics"
) -> StandIn:
    return StandIn(kind, source=source, assumed=assumed)


OPENVLA_EVALUATION = "openvla: experiments/robot/libero/run_libero_eval.py (unnorm_key)"
OFT_EVALUATION = "openvla-oft: experiments/robot/libero/run_libero_eval.py (unnorm_key), experiments/robot/openvla_utils.py (files)"
BASE_SOURCE = "RLinf a3816b59: examples/embodiment/config/maniskill_ppo_openvlaoft.yaml"
TRAINED = "RLinf: docs/source-en/rst_source/examples/embodied/maniskill.rst"
SUITES = ("spatial", "object", "goal", "10")
OFT_MANISKILL = StandIn(
    "openvla_oft",
    ("bridge_orig",),
    source=f"{BASE_SOURCE} (unnorm_key)",
    assumed="its files and datasets",
)
STAND_INS = {
    "openvla/openvla-7b": StandIn(
        "openvla", ("bridge_orig", "fractal20220817_data"), source="its config.json"
    ),
    **{
        f"openvla/openvla-7b-finetuned-libero-{suite}": StandIn(
            "openvla",
            ("bridge_orig",),
            (f"libero_{suite}",),
            OPENVLA_EVALUATION,
            "that both files of statistics are there",
        )
        for suite in SUITES
    },
    **{
        f"moojink/openvla-7b-oft-finetuned-libero-{suite}": StandIn(
            "openvla_oft_l1",
            ("bridge_orig",),
            (f"libero_{suite}_no_noops",),
            OFT_EVALUATION,
            "the step in the names of its files",
        )
        for suite in SUITES
    },
    "moojink/openvla-7b-oft-finetuned-libero-spatial-object-goal-10": StandIn(
        "openvla_oft_l1",
        ("bridge_orig",),
        tuple(f"libero_{suite}_no_noops" for suite in SUITES),
        OFT_EVALUATION,
        "the step in the names of its files",
    ),
    "gen-robot/openvla-7b-rlvla-warmup": StandIn(
        "openvla",
        ("bridge_orig",),
        ("warmup",),
        source="RL4VLA 55f966d6: openvla/vla-scripts/finetune.py, merge script",
        assumed="that both files of statistics are there, and their datasets",
    ),
    "gen-robot/openvla-7b-rlvla-rl": StandIn(
        "openvla", ("bridge_orig",), ("warmup",), TRAINED, "as of the warm-up"
    ),
    **{
        f"RLinf/RLinf-OpenVLA-{name}-ManiSkill3-25ood": StandIn(
            "openvla", ("bridge_orig",), source=TRAINED, assumed="its files"
        )
        for name in ("PPO", "GRPO")
    },
    "RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Main": OFT_MANISKILL,
    **{
        f"RLinf/RLinf-OpenVLAOFT-{name}-ManiSkill3-25ood": OFT_MANISKILL for name in ("PPO", "GRPO")
    },
    "RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Lora": StandIn(
        "adapter",
        source=f"{BASE_SOURCE} (lora_path)",
        assumed="a PEFT directory, and the modules that it adapts",
    ),
    **{
        f"Haozhan72/Openvla-oft-SFT-{name}-{data}": libero_oft(f"{suite}_no_noops")
        for name, suite in (
            *((f"libero-{each}", f"libero_{each}") for each in ("spatial", "object", "goal")),
            ("libero10", "libero_10"),
        )
        for data in ("traj1", "trajall")
    },
    "Haozhan72/openvla-oft-libero10-traj1-rl": libero_oft("libero_10_no_noops"),
    **{
        f"RLinf/RLinf-OpenVLAOFT-GRPO-LIBERO-{name}": libero_oft(
            f"libero_{name.replace('long', '10')}_no_noops"
        )
        for name in ("spatial", "object", "goal", "long", "90")
    },
    "RLinf/RLinf-OpenVLAOFT-LIBERO-90-Base-Lora": libero_oft("libero_90_no_noops_trajall"),
    "RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora": libero_oft("libero_130_no_noops_trajall"),
    "RLinf/RLinf-OpenVLAOFT-LIBERO-130": libero_oft("libero_130_no_noops_trajall"),
    "RLinf/RLinf-Pi0-LIBERO-Spatial-Object-Goal-SFT": pi("pi0", "libero"),
    "RLinf/RLinf-Pi0-LIBERO-Long-SFT": pi("pi0", "libero"),
    "RLinf/RLinf-Pi05-LIBERO-SFT": pi("pi05", "libero"),
    **{
        f"RLinf/RLinf-{name}-ManiSkill-25Main-{stage}": pi(kind, "maniskill")
        for name, kind in (("Pi0", "pi0"), ("Pi05", "pi05"))
        for stage in ("SFT", "RL-FlowSDE", "RL-FlowNoise")
    },
    **{
        f"lerobot/{kind}_libero_finetuned": lerobot(
            f"lerobot_{kind}", "lerobot: docs/source/libero.mdx"
        )
        for kind in ("pi0", "pi05")
    },
    "lerobot/pi05-libero": lerobot(
        "lerobot_pi05", "lerobot: docs/source/libero.mdx", "that there is such a repository"
    ),
    **{
        f"lerobot/{kind}_{name}": lerobot(
            f"lerobot_{kind}_base", "lerobot#1910", "that its processors hold no statistics"
        )
        for kind in ("pi0", "pi05")
        for name in ("base", "libero", "libero_base")
    },
    "google/paligemma-3b-pt-224": StandIn(
        "tokenizer", source="openpi: src/openpi/models/tokenizer.py"
    ),
}


@cache
def files(name: str) -> dict[str, bytes]:
    """What the repository holds, by path."""
    stand_in = STAND_INS[name]
    held = dict(saved(stand_in.kind))
    statistics = held.pop(STATISTICS, held.pop(NORM_STATS, b""))
    if stand_in.kind in ("pi0", "pi05"):
        (folder,) = stand_in.datasets
        held[f"{folder}/{NORM_STATS}"] = statistics
    elif stand_in.kind.startswith("openvla"):
        (numbers,) = json.loads(statistics).values()
        held["config.json"] = text(
            json.loads(held["config.json"])
            | {"norm_stats": dict.fromkeys(stand_in.datasets, numbers)}
        )
        if stand_in.own:
            held[STATISTICS] = text(dict.fromkeys(stand_in.own, numbers))
    return held


@cache
def saved(kind: str) -> dict[str, bytes]:
    """Files of a small model with random weights, in the official layout."""
    with TemporaryDirectory() as folder:
        bare, whole = Path(folder) / "bare", Path(folder) / "whole"
        WRITERS[kind](kind, bare, whole)
        found = {
            path.relative_to(whole).as_posix(): path.read_bytes()
            for path in whole.rglob("*")
            if path.is_file()
        }
    if "config.json" in found:
        found["config.json"] = text(
            {
                key: value
                for key, value in json.loads(found["config.json"]).items()
                if key not in OURS
            }
        )
    return found


def openvla(kind: str, bare: Path, whole: Path) -> None:
    policy = bare_openvla(kind, bare)
    whole.mkdir()
    policy.save(whole)


def bare_openvla(kind: str, bare: Path) -> Any:
    write_openvla(bare, action_dim=ACTION_DIM)
    if kind == "openvla":
        return OpenVLAPolicy.load(bare, OpenVLAOptions(random_weights=True))
    return OpenVLAOFTPolicy.load(
        bare, OpenVLAOFTOptions(random_weights=True, head="discrete", images=["base"], chunk=8)
    )


def adapter(kind: str, bare: Path, whole: Path) -> None:
    policy = bare_openvla("openvla_oft", bare)
    add_lora(policy, LoraOptions(rank=4), seed=0)
    save_adapter(policy.backbone, adapter_state(policy.backbone), whole)


def flow(kind: str, bare: Path, whole: Path) -> None:
    write_pi0(bare, action_dim=ACTION_DIM)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_bytes(
        text(config | {"pi05": kind == "pi05", "action_horizon": 10})
    )
    policy = Pi0Policy.load(bare, Pi0Options(random_weights=True))
    whole.mkdir()
    policy.save(whole)
    (whole / TOKENIZER).unlink()  # openpi's checkpoints have none


def regression(kind: str, bare: Path, whole: Path) -> None:
    """Two cameras; the head and the projector of the state are files of PyTorch, as openvla-oft saves them."""
    write_openvla(bare, action_dim=ACTION_DIM)
    options = OpenVLAOFTOptions(
        random_weights=True, head="l1", proprio=True, images=["base", "wrist"], chunk=8
    )
    policy = OpenVLAOFTPolicy.load(bare, options)
    whole.mkdir()
    policy.save(whole)
    (whole / "action_head.safetensors").unlink()
    parts = {
        "action_head": policy.action_head,
        "proprio_projector": policy.backbone.proprio_projector,
    }
    weights = {name: value.read() for name, value in read_safetensors(whole / WEIGHTS).items()}
    write_safetensors(
        {
            name: value
            for name, value in weights.items()
            if not name.startswith("proprio_projector.")
        },
        whole / WEIGHTS,
    )
    for name, part in parts.items():
        assert part is not None
        torch.save(
            {f"module.{key}": value for key, value in part.state_dict().items()},
            whole / f"{name}--150000_checkpoint.pt",
        )


def lerobot_flow(kind: str, bare: Path, whole: Path) -> None:
    """In lerobot's layout; a base model (``..._base``) has no statistics."""
    _, name, *base = kind.split("_")
    flow(name, bare, whole)
    (whole / NORM_STATS).unlink()
    config = json.loads((whole / "config.json").read_text())
    modes = {
        "VISUAL": "IDENTITY",
        **dict.fromkeys(("STATE", "ACTION"), "QUANTILES" if name == "pi05" else "MEAN_STD"),
    }
    sizes = {
        "max_state_dim": 32,
        "max_action_dim": config.pop("action_dim"),
        "chunk_size": 50,
        "n_action_steps": 50,
    }
    (whole / "config.json").write_bytes(
        text(config | sizes | {"type": name, "normalization_mapping": modes})
    )
    write_processors(
        whole,
        modes,
        {part: {} if base else numbers for part, numbers in unit_statistics(ACTION_DIM).items()},
    )
    weights = {
        f"model.{name}": value.read() for name, value in read_safetensors(whole / WEIGHTS).items()
    }
    write_safetensors(weights, whole / WEIGHTS)


def tokenizer(kind: str, bare: Path, whole: Path) -> None:
    write_pi0(bare)
    whole.mkdir()
    (bare / TOKENIZER).rename(whole / TOKENIZER)


WRITERS: dict[str, Callable[[str, Path, Path], None]] = {
    "openvla": openvla,
    "openvla_oft": openvla,
    "adapter": adapter,
    "pi0": flow,
    "pi05": flow,
    "openvla_oft_l1": regression,
    **{f"lerobot_{kind}{base}": lerobot_flow for kind in ("pi0", "pi05") for base in ("", "_base")},
    "tokenizer": tokenizer,
}


def text(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


PAGE = Path(__file__).parents[1] / "docs" / "results" / "assumed_repositories.md"
HEAD = """# What is assumed of published repositories

The recipes of [published runs](../presets.md#recipes-of-whole-runs) are tested on stand-ins: small
models with random weights under the published names, with the files and statistics below. No
repository could be read where they were made. **If one differs, please open an issue**: with its list
of files, and the names of its datasets. `python -m tests.stand_ins` writes this page.

| repository | files of the stand-in | source | assumed |
|---|---|---|---|
"""


def page() -> str:
    rows = []
    for name, stand_in in sorted(STAND_INS.items(), key=lambda item: item[0].lower()):
        held = ", ".join(f"`{path}`" for path in sorted(files(name)))
        datasets = ", ".join(stand_in.own or stand_in.datasets)
        rows.append(
            f"| {name} | {held}{f'; {datasets}' if datasets else ''} | {stand_in.source} | {stand_in.assumed or '–'} |"
        )
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
