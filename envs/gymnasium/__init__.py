"""Plug-in for any gymnasium environment. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``simulator``; only the latter, in its own process, uses gymnasium.
"""
