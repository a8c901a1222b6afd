"""Robots: the control loop, the session with an operator, and online learning beside it.

Reached by the command line only; a run in a simulator does not import it.
"""
