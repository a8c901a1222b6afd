"""Franka Research 3 through franky (libfranka), real or simulated by franky-sim."""
