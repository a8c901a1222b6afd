"""Predict how long an iteration takes under a plan, and choose a plan (README.md)."""
