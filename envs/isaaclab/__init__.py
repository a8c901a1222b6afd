"""Isaac Lab plug-in. The entry point names ``plugin.plugin``.

Read ``config``, ``tasks``, ``plugin``, ``simulator``; only the latter, in a process of the
interpreter ``env.python``, uses Isaac Lab.
"""
