"""Cards of the published OpenVLA and OpenVLA-OFT checkpoints.

Sources: model cards and evaluation code of openvla and openvla-oft (``run_libero_eval.py``),
SimpleVLA-RL and RLinf. What they do not state is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlinf_vla.core.protocols import ToolUnits

from ..cards import LIBERO_CONVENTION, Card, repository_of

LIBERO_EVALUATION = {"center_crop": True, "resize": "rlds", "gripper": "close_positive"}
"""run_libero_eval.py: gripper 2g - 1, its sign, inverted; JPEG, Lanczos, and a crop to 90 %."""
ONE_CAMERA = {"images": ["base"], "head": "discrete", "chunk": 8, "proprio": False, "film": False}
"""The checkpoints that both RL projects start from on LIBERO."""
OPENVLA_ENV = {"convention": "openvla"}

CARDS = (
    # the base model: Bridge's actions are metres and radians; the gripper runs from 0 to 1
    Card("openvla", ("openvla/openvla-7b",), ("openvla", "openvla_oft"), tools={"bridge_orig": ToolUnits(1.0, 1.0)}),
    Card(
        "openvla_libero",
        ("openvla/openvla-7b-finetuned-libero-*",),
        ("openvla",),
        {"image": "base", **LIBERO_EVALUATION},
        LIBERO_CONVENTION,
        OPENVLA_ENV,
    ),
    # main camera, then wrist; regression head; position, rotation vector and both fingers
    Card(
        "openvla_oft_libero",
        ("moojink/openvla-7b-oft-finetuned-libero-*",),
        ("openvla_oft",),
        {
            "images": ["base", "wrist"],
            "head": "l1",
            "chunk": 8,
            "proprio": True,
            "film": False,
            "stop_token": True,
            **LIBERO_EVALUATION,
        },
        LIBERO_CONVENTION,
        OPENVLA_ENV,
    ),
    Card(
        "simplevla_libero",
        ("haozhan72/openvla-oft-sft-*libero*",),
        ("openvla_oft",),
        {**ONE_CAMERA, "stop_token": True, "gripper": "close_positive"},
        LIBERO_CONVENTION,
        OPENVLA_ENV,
    ),
    # no stop token; resized by torchvision's bicubic, to which `processor` is nearest
    Card(
        "rlinf_libero",
        ("rlinf/rlinf-openvlaoft-*libero*",),
        ("openvla_oft",),
        {**ONE_CAMERA, "stop_token": False, "resize": "processor", "gripper": "close_positive"},
        LIBERO_CONVENTION,
        OPENVLA_ENV,
    ),
    Card(
        "rlinf_maniskill",
        ("rlinf/rlinf-openvlaoft-*maniskill*",),
        ("openvla_oft",),
        {"images": ["base"], "head": "discrete", "stop_token": False},
    ),
)

_SUITE = re.compile(r"libero[-_]?(spatial|object|goal|10|90)(?![a-z0-9])(?!.*(spatial|object|goal|-10))", re.IGNORECASE)


def suite_key(directory: Path, statistics: dict[str, Any]) -> str | None:
    """Return the dataset of the LIBERO suite that the repository is named after, if it has one.

    As the official evaluation: the suite's name, else the one with ``_no_noops``.
    """
    found = _SUITE.search(repository_of(directory))
    names = [] if found is None else [f"libero_{found[1].lower()}", f"libero_{found[1].lower()}_no_noops"]
    return next((name for name in names if name in statistics), None)
