"""Teleoperation devices of human operators (entry points ``rlinf_vla.operators``).

May enter: one module per device, which turns its reports into events. Read ``device_reader``, then
a device: ``keyboard``, ``gamepad``, ``spacemouse``. Not yet tested on hardware.
"""
