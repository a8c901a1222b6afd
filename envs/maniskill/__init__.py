"""ManiSkill 3: ``plugin`` is what the entry point names. Importing this imports neither ManiSkill nor SAPIEN."""

from __future__ import annotations

from .config import ManiSkillConfig
from .plugin import ManiSkill

__all__ = ["ManiSkill", "ManiSkillConfig", "plugin"]

plugin = ManiSkill()
