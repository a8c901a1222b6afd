"""What stands beside the trainer: planner, robots, servers, sweeps and pages (README.md)."""
