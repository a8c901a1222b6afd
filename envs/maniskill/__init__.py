"""ManiSkill 3 plug-in. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``tasks``, ``simulator``, ``experts``. Only ``simulator``,
``lowpoly``, ``put_on_plate`` and ``put_on_plate_25`` use ManiSkill, on first use; ``vulkan`` is the
driver it needs. ``plates_splits``, ``plates_parts`` and ``plates_tables`` say what PutOnPlate25 is.
"""
