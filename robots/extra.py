"""Install commands for the dependencies that only ``robots`` needs."""

INSTALL = "pip install 'rlinf-vla[franka]'"
LIBUSB = "apt-get install libusb-1.0-0"
"""Without libusb, an installed pyrealsense2 cannot be imported."""
