"""Real and simulated robot arms that implement ``rlinf_vla.core.robot.Robot``."""
