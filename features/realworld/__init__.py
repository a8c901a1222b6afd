"""At a robot: the control loop, the session with an operator, and online learning (README.md)."""
