"""Dataclasses of a recipe, with the range of each key, and checks across keys.

The lowest room: it imports neither plug-ins nor Hydra nor PyTorch.
"""
