"""Cards of the published π₀ and π₀.₅ checkpoints."""

from __future__ import annotations

from typing import Any

from rlinf_vla.core.protocols import Convention, ToolUnits

from ..cards import LIBERO_CONVENTION, Card

LIBERO: dict[str, Any] = {
    "models": ("pi0",),
    "convention": LIBERO_CONVENTION,
    "env": {"convention": "openvla"},
}
CAMERAS = {"images": ["base", "wrist"]}
REPLANNING = {"chunk": 5}
"""openpi ``examples/libero/main.py``, ``replan_steps``."""
OF_PI05 = {**CAMERAS, **REPLANNING, "state_in_prompt": False, "delta_mask": []}
OF_PI0 = {**CAMERAS, **REPLANNING, "delta_mask": [6, -1]}
PI05, PI0 = {**OF_PI05, "action_horizon": 10}, {**OF_PI0, "action_horizon": 50}
"""openpi 15a9616a: training configs ``pi05_libero`` (action_horizon=10, discrete_state_input=False,
extra_delta_transform=False) and ``pi0_libero`` (the default of 50, extra_delta_transform=True)."""
OPENPI_SOURCE = "openpi: src/openpi/training/config.py, src/openpi/policies/libero_policy.py, examples/libero/main.py"
RLINF_SOURCE = "RLinf 0939558f: rlinf/models/embodiment/openpi/dataconfig/__init__.py, which repeats openpi's configs"
LEROBOT_SOURCE = "lerobot: src/lerobot/processor/env_processor.py (cameras turned by 180 degrees, state), docs/source/libero.mdx"
MANISKILL: dict[str, Any] = {
    "models": ("pi0",),
    "convention": Convention(ToolUnits(1.0, 1.0), state="qpos", images="upright"),
    "source": (
        "RLinf a3816b59: rlinf/models/embodiment/openpi/dataconfig (pi0_maniskill, pi05_maniskill), rlinf/envs/action_utils.py; "
        "ef8d0c16: examples/embodiment/config/maniskill_ppo_openpi.yaml, ..._pi05.yaml (action_horizon, num_action_chunks)"
    ),
    "layout": "openpi",
}
"""One camera, in black bars; all joints; metres and radians; above 0.5 the gripper opens."""
OF_MANISKILL = {
    "images": ["base"],
    "chunk": 5,
    "action_horizon": 8,
    "delta_mask": [],
    "gripper": "open_positive",
}
CONVERTED: dict[str, Any] = {
    **LIBERO,
    "source": OPENPI_SOURCE,
    "layout": "lerobot",
    "assumed": "it is openpi's checkpoint in lerobot's layout (its processors hold no statistics), so openpi's settings apply",
}
"""lerobot's config.json has the horizon."""

CARDS = (
    # openpi's own, in JAX or PyTorch, and RLinf's fine-tunes in the same layout
    Card(
        "pi05_libero",
        ("*/pi05_libero*",),
        source=OPENPI_SOURCE,
        options=PI05,
        layout="openpi",
        **LIBERO,
    ),
    Card(
        "pi0_libero",
        ("*/pi0_libero*",),
        source=OPENPI_SOURCE,
        options=PI0,
        layout="openpi",
        **LIBERO,
    ),
    Card(
        "rlinf_pi05_libero",
        ("rlinf/rlinf-pi05-*libero*",),
        source=RLINF_SOURCE,
        options=PI05,
        layout="openpi",
        **LIBERO,
    ),
    Card(
        "rlinf_pi0_libero",
        ("rlinf/rlinf-pi0-*libero*",),
        source=RLINF_SOURCE,
        options=PI0,
        layout="openpi",
        **LIBERO,
    ),
    Card(
        "rlinf_pi05_maniskill",
        ("rlinf/rlinf-pi05-*maniskill*",),
        options={**OF_MANISKILL, "state_in_prompt": False},
        **MANISKILL,
    ),
    Card(
        "rlinf_pi0_maniskill", ("rlinf/rlinf-pi0-*maniskill*",), options=OF_MANISKILL, **MANISKILL
    ),
    # fine-tuned by lerobot: LIBERO's actions as they are; the mode of normalisation is in the files
    Card(
        "lerobot_pi05_libero",
        ("lerobot/pi05_libero_finetuned*", "lerobot/pi05-libero*"),
        source=f"{LEROBOT_SOURCE} (n_action_steps=10); lerobot#2863",
        options={
            **CAMERAS,
            "chunk": 10,
            "state_in_prompt": True,
            "prompt_state_dim": 32,
            "delta_mask": [],
        },
        assumed="the prompt has the state padded to 32 numbers, as in lerobot when it was published (lerobot#2863)",
        layout="lerobot",
        **LIBERO,
    ),
    Card(
        "lerobot_pi0_libero",
        ("lerobot/pi0_libero_finetuned*",),
        source=LEROBOT_SOURCE,
        options={**CAMERAS, "delta_mask": []},
        layout="lerobot",
        **LIBERO,
    ),
    Card(
        "lerobot_pi05_libero_base",
        ("lerobot/pi05_libero", "lerobot/pi05_libero_base*"),
        options=OF_PI05,
        **CONVERTED,
    ),
    Card(
        "lerobot_pi0_libero_base",
        ("lerobot/pi0_libero", "lerobot/pi0_libero_base*"),
        options=OF_PI0,
        **CONVERTED,
    ),
    # no environment here has what they were pre-trained on
    Card(
        "pi0_base",
        ("*/pi0_base*", "*/pi05_base*"),
        ("pi0",),
        source="openpi: the default of Pi0Config",
        options={"action_horizon": 50},
    ),
)
