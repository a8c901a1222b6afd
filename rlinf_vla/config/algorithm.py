"""Base of the recipe node ``algorithm``, whose keys each algorithm defines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlinf_vla.config.ranges import Name

ON_POLICY, OFF_POLICY, SUPERVISED = "on-policy", "off-policy", "supervised"
NO_ALGORITHM = "none"
"""Algorithm name of a recipe without training, for ``rlinf-vla eval``."""


@dataclass
class AlgorithmConfig:
    """Base of the recipe nodes ``algorithm``; each has a key ``name``."""

    family: ClassVar[str] = ""
    """How it learns: from its own rollouts, from a replay buffer, or from labelled data."""
    trains_reward: ClassVar[bool] = False
    """Whether it trains the network of a reward instead of a policy."""


@dataclass
class NoAlgorithmConfig(AlgorithmConfig):
    """``algorithm=none``: the recipe is for evaluation only."""

    name: Name = NO_ALGORITHM
