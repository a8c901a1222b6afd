"""LIBERO plug-in. The entry point names ``plugin.plugin``.

Read ``config``, ``plugin``, ``suites``; in the simulator's process ``simulator``, ``scene``,
``episode``, ``placement``, ``conventions``, ``experts``, which may import neither PyTorch nor the
trainer's packages. ``perturbations`` names the modules of perturbed suites.
"""
