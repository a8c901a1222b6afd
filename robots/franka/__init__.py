"""A Franka Research 3 through franky (libfranka), or the same through franky-sim."""
