"""Measure policies on fixed episodes: sweeps, statistics, results that can be verified."""
