"""How to get what this package needs and the rest of ``rlinf_vla`` does not."""

INSTALL = "pip install 'rlinf-vla[franka]'"
LIBUSB = "apt-get install libusb-1.0-0"
"""Without it pyrealsense2 is installed and cannot be imported."""
