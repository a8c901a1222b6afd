"""ManiSkill 3 plug-in. The entry point names ``plugin.plugin``."""
