"""ManiSkill 3 plug-in. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``tasks``, ``simulator``, ``experts``. Only the modules that simulate
(``simulator``, ``batched``, ``put_on_plate``) and ``lowpoly`` may use ManiSkill; ``vulkan`` is the
driver that it needs.
"""
