"""Simulator plug-ins: each implements ``rlinf_vla.core.protocols.EnvPlugin`` as an entry point."""
