"""Simulated cell: franky-sim serves franky and libfranka on loopback, MuJoCo simulates an FR3.

The arm stands at a table, and rendered cameras observe it.
"""
