"""A stand-in that speaks Isaac Lab's API as far as ``envs/isaaclab`` uses it: an arm as a free tool, in PyTorch.

Written from the sources that ``envs/isaaclab/simulator.py`` names; nothing is copied.
"""

import os

__version__ = os.environ.get("STAND_IN_VERSION", "2.3.0")
"""Version 3 has quaternions x y z w."""
