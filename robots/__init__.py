"""Real arms and their simulated twins, behind ``rlinf_vla.robot.Robot``."""
