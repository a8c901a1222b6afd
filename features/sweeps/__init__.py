"""Sweeps over policies, and comparisons of recorded evaluations (README.md)."""
