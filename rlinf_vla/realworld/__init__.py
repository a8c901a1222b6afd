"""Robots: the control loop, the session with an operator, and online learning beside it.

Reading order of what moves an arm: ``operator_session`` (between episodes), ``player`` (one
episode), ``control_loop`` (one step per period) with ``inference`` (which action) and
``tool_target`` (its target). Then in ``robots/``: ``franka/client`` (sends the target),
``franka/process`` and ``franka/servo`` (the arm's process), ``safety`` (its limits) and
``franka/driver``. ``process`` runs all of this for the learner, of which ``client`` is the end.

Only the command line imports this room; a run in a simulator does not.
"""
