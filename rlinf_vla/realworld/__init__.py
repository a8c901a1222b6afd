"""At a robot: the control loop, the session with an operator, and online learning beside it.

May enter: what needs a robot but not a certain one; only the command line imports this room. Read
``operator_session`` (between episodes), ``player`` (one episode), ``control_loop`` (one step) with
``inference`` and ``tool_target``, then ``robots/franka``. ``process`` runs these for ``client``.
"""
