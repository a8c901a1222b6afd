"""Cards of the published OpenVLA and OpenVLA-OFT checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlinf_vla.core.protocols import ToolUnits

from ..cards import LIBERO_CONVENTION, Card, repository_of

LIBERO_EVALUATION = {"center_crop": True, "resize": "rlds", "gripper": "close_positive"}
"""run_libero_eval.py: gripper 2g - 1, its sign, inverted; JPEG, Lanczos, and a crop to 90 %."""
PROCESSOR_ONLY = {"center_crop": False, "resize": "processor"}
"""RLinf never crops: ``center_crop`` of its recipes only becomes an attribute of the configuration,
and its ``processing_prismatic.py`` crops to the size that it has resized to."""
ONE_CAMERA = {"images": ["base"], "head": "discrete", "chunk": 8, "proprio": False, "film": False}
"""The checkpoints that both RL projects start from on LIBERO."""
LIBERO: dict[str, Any] = {"convention": LIBERO_CONVENTION, "env": {"convention": "openvla"}}
BRIDGE = {"bridge_orig": ToolUnits(1.0, 1.0)}
"""``relabel_bridge_actions`` makes a motion the difference of two poses, in metres and radians; 1
opens the gripper, 0 closes it."""
RL4VLA = {**BRIDGE, "warmup": ToolUnits(1.0, 1.0)}
"""The warm-up data is un-normalised by bridge_orig's statistics (RL4VLA: finetune.py)."""

CARDS = (
    Card(
        "openvla",
        ("openvla/openvla-7b",),
        ("openvla", "openvla_oft"),
        source="openvla: prismatic/vla/datasets/rlds/oxe/transforms.py, bridge_orig_dataset_transform",
        tools=BRIDGE,
    ),
    Card(
        "openvla_libero",
        ("openvla/openvla-7b-finetuned-libero-*",),
        ("openvla",),
        source="openvla: experiments/robot/libero/run_libero_eval.py",
        options={"image": "base", **LIBERO_EVALUATION},
        **LIBERO,
    ),
    # main camera, then wrist; regression head; position, rotation vector and both fingers
    Card(
        "openvla_oft_libero",
        ("moojink/openvla-7b-oft-finetuned-libero-*",),
        ("openvla_oft",),
        source="openvla-oft 213c5ff8: experiments/robot/libero/run_libero_eval.py, prismatic/vla/constants.py",
        options={
            "images": ["base", "wrist"],
            "head": "l1",
            "chunk": 8,
            "proprio": True,
            "film": False,
            "stop_token": True,
            **LIBERO_EVALUATION,
        },
        **LIBERO,
    ),
    # the script sets center_crop=True, use_proprio=False, one image and chunks of 8
    Card(
        "simplevla_libero",
        ("haozhan72/openvla-oft-*libero*",),
        ("openvla_oft",),
        source="SimpleVLA-RL d1622a91: verl/workers/rollout/rob_rollout.py; 462f23d9: examples/run_openvla_oft_rl_libero.sh",
        options={**ONE_CAMERA, "stop_token": True, **LIBERO_EVALUATION},
        **LIBERO,
    ),
    Card(
        "rlinf_libero",
        ("rlinf/rlinf-openvlaoft-*libero*",),
        ("openvla_oft",),
        source="RLinf 0342ae67: rlinf/envs/action_utils.py; 052cd822: examples/embodiment/config/libero_spatial_grpo_openvlaoft.yaml",
        options={**ONE_CAMERA, "stop_token": False, **LIBERO_EVALUATION, **PROCESSOR_ONLY},
        assumed="images resized by Pillow's bicubic filter (RLinf resizes tensors by torchvision's)",
        **LIBERO,
    ),
    Card(
        "rlinf_maniskill",
        ("rlinf/rlinf-openvlaoft-*maniskill*",),
        ("openvla_oft",),
        source="RLinf 0342ae67: rlinf/envs/action_utils.py (1 opens); 011cc1e9: examples/embodiment/config/maniskill_grpo_openvlaoft.yaml",
        options={
            "images": ["base"],
            "head": "discrete",
            "stop_token": False,
            "gripper": "open_positive",
            **PROCESSOR_ONLY,
        },
        dataset="bridge_orig",
        tools=BRIDGE,
    ),
    Card(
        "rl4vla_maniskill",
        ("gen-robot/openvla-7b-rlvla-*", "rlinf/rlinf-openvla-*maniskill*"),
        ("openvla",),
        source="RLinf 0342ae67: rlinf/envs/action_utils.py (1 opens); docs: rst_source/examples/embodied/maniskill (which names both)",
        options={"image": "base", "gripper": "open_positive", **PROCESSOR_ONLY},
        dataset="bridge_orig",
        tools=RL4VLA,
    ),
)

_OF_ONE_SUITE = re.compile(r"(libero_(?:spatial|object|goal|10|90))(?:_no_noops(?:_trajall)?)?")
_SUITE = re.compile(
    r"libero[-_]?(spatial|object|goal|10|long|90|130)(?![a-z0-9])(?!.*(spatial|object|goal|-10))",
    re.IGNORECASE,
)


def suite_key(directory: Path, statistics: dict[str, Any]) -> str | None:
    """Return the dataset of the LIBERO suite that the repository is named after, if it has one.

    As the official evaluation: the suite's name, else the one with ``_no_noops``; RLinf's data of
    several suites ends in ``_no_noops_trajall``.
    """
    suites = {
        match[1].lower().replace("long", "10")
        for name in repository_of(directory)
        if (match := _SUITE.search(name))
    }
    names = [
        f"libero_{suite}{ending}"
        for suite in suites
        for ending in ("", "_no_noops", "_no_noops_trajall")
    ]
    return next((name for name in names if name in statistics), None) if len(suites) == 1 else None


def suite_of(dataset: str) -> str | None:
    """Return the suite of LIBERO whose data alone a dataset has; None if it is another dataset."""
    match = _OF_ONE_SUITE.fullmatch(dataset)
    return None if match is None else match[1]
