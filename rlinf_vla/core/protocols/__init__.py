"""Protocols that model, simulator and reward plug-ins implement.

The engine knows plug-ins only through this module. A package registers them as entry points:
``rlinf_vla.models`` (a :class:`Policy` subclass), ``rlinf_vla.envs`` (an :class:`EnvPlugin`) and
``rlinf_vla.rewards`` (a :class:`RewardPlugin`). Modules of the latter two must be cheap to import:
they import PyTorch, simulators and drivers on first use, and ``core/tasks.py`` instead of this one.
"""

from rlinf_vla.core.tasks import Diagnosis as Diagnosis
from rlinf_vla.core.tasks import Suite as Suite
from rlinf_vla.core.tasks import Task as Task

from .convention import Convention as Convention
from .convention import ToolUnits as ToolUnits
from .env import EnvPlugin as EnvPlugin
from .env import EnvSpec as EnvSpec
from .env import HasOutline as HasOutline
from .env import HasSuites as HasSuites
from .env import Reward as Reward
from .env import RewardPlugin as RewardPlugin
from .env import VectorEnv as VectorEnv
from .policy import ImageSize as ImageSize
from .policy import KeyedNoise as KeyedNoise
from .policy import Noise as Noise
from .policy import NoiseKeys as NoiseKeys
from .policy import Policy as Policy
from .policy import PolicySpec as PolicySpec
from .policy import RealTimeChunking as RealTimeChunking
from .policy import precompute_frozen as precompute_frozen
from .reward_model import Learner as Learner
from .reward_model import RewardModel as RewardModel
from .reward_model import prepared as prepared
