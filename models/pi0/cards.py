"""Cards of the published π₀ and π₀.₅ checkpoints.

Sources: openpi's training configs ``pi0_libero`` and ``pi05_libero``, and its LIBERO example. What
they do not state is left out.
"""

from __future__ import annotations

from ..cards import LIBERO_CONVENTION, Card

LIBERO_ENV = {"convention": "openvla"}
CAMERAS = {"images": ["base", "wrist"]}
REPLANNING = {"chunk": 5}
"""Actions that openpi's LIBERO example executes of a horizon."""

CARDS = (
    Card(
        "pi05_libero",
        ("*/pi05_libero*",),
        ("pi0",),
        {**CAMERAS, **REPLANNING, "action_horizon": 10, "state_in_prompt": False, "delta_mask": []},
        LIBERO_CONVENTION,
        LIBERO_ENV,
    ),
    Card(
        "pi0_libero",
        ("*/pi0_libero*",),
        ("pi0",),
        {**CAMERAS, **REPLANNING, "action_horizon": 50, "delta_mask": [6, -1]},
        LIBERO_CONVENTION,
        LIBERO_ENV,
    ),
)
