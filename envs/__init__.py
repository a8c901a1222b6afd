"""Simulators: each implements ``rlinf_vla.protocols.EnvPlugin`` and is found through an entry point."""
