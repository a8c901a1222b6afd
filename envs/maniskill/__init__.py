"""ManiSkill 3 plug-in. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``tasks``, ``simulator``, ``experts``. Only ``simulator``,
``lowpoly`` and ``put_on_plate`` use ManiSkill, on first use; ``vulkan`` is the driver it needs.
"""
