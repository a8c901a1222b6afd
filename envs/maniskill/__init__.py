"""ManiSkill 3 plug-in; the entry point names ``plugin``. Imports neither ManiSkill nor SAPIEN."""

from __future__ import annotations

from .config import ManiSkillConfig
from .plugin import ManiSkill

__all__ = ["ManiSkill", "ManiSkillConfig", "plugin"]

plugin = ManiSkill()
