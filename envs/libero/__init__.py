"""LIBERO plug-in. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``suites``; in the simulator's process ``simulator``, ``scene``,
``conventions``, ``experts``, which may import neither PyTorch nor the trainer's packages.
"""
