"""Plug-in for Newton. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``simulator``, ``world``. Scenes, success and the expert are those of
``envs.genesis``.
"""
