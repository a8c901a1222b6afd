"""Create a tiny π₀: the official architecture at about a million parameters.

``python -m rlinf_vla.models.pi0.tiny DIRECTORY [ACTION_DIM]`` writes config.json, tokenizer.json
and norm_stats.json (no weights).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..files import CONFIG, TOKENIZER
from ..openvla.tiny import IMAGE, SPECIAL, VOCABULARY, tokenizer
from .checkpoint import NORM_STATS


def config() -> dict[str, Any]:
    attention = {"depth": 3, "num_heads": 4, "num_kv_heads": 1, "head_dim": 32}
    return {
        "paligemma": attention | {"width": 128, "mlp_dim": 256},
        "action_expert": attention | {"width": 96, "mlp_dim": 192},
        "vision": {
            "hidden_size": 96,
            "intermediate_size": 288,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": IMAGE,
            "patch_size": 16,
        },
        "vocab_size": VOCABULARY,
        "action_dim": 8,
        "action_horizon": 4,
        "bos_token_id": SPECIAL.index("<s>"),
    }


def statistics(action_dim: int) -> dict[str, Any]:
    """Return statistics: unchanged actions; state of a table top (m, quaternion, m of a finger)."""
    low, high = [-0.2, -0.3, 0.0, -1, -1, -1, -1, 0.0], [0.2, 0.3, 0.3, 1, 1, 1, 1, 0.04]
    return {
        "state": {
            "mean": [(a + b) / 2 for a, b in zip(low, high, strict=True)],
            "std": [(b - a) / 2 for a, b in zip(low, high, strict=True)],
            "q01": low,
            "q99": high,
        },
        "actions": {"mean": [0.0] * action_dim, "std": [1.0] * action_dim, "q01": [-1.0] * action_dim, "q99": [1.0] * action_dim},
    }


def main(directory: Path, action_dim: int = 4) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config(), indent=1) + "\n")
    (directory / NORM_STATS).write_text(json.dumps({"norm_stats": statistics(action_dim)}, indent=1) + "\n")
    tokenizer().save(str(directory / TOKENIZER), pretty=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
