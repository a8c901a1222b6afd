"""What `rlinf-vla bench` measures: one module per benchmark, each with a `run`.

May enter: what measures the project; nothing else imports it but tests. Read harness, then the
benchmark: update has the parts update_*, policy roofline, control synthetic_cell, env and rollout
simulators/. robot_safety runs by itself.
"""
