"""Teleoperation devices of human operators (entry points ``rlinf_vla.operators``).

Not yet tested on hardware.
"""
