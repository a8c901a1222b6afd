"""What a plug-in implements. The engine knows models and simulators only through this page.

A package announces its plug-ins by entry points: ``rlinf_vla.models`` (a :class:`Policy` subclass) and ``rlinf_vla.envs``
(an :class:`EnvPlugin`). A plug-in module must be cheap to import: simulators and drivers are imported when first used.
"""

from .env import Baseline as Baseline
from .env import Diagnosis as Diagnosis
from .env import EnvPlugin as EnvPlugin
from .env import EnvSpec as EnvSpec
from .env import HasBaselines as HasBaselines
from .env import HasParts as HasParts
from .env import Part as Part
from .env import Task as Task
from .env import ToolUnits as ToolUnits
from .env import VectorEnv as VectorEnv
from .policy import ActsOnto as ActsOnto
from .policy import ImageSize as ImageSize
from .policy import Noise as Noise
from .policy import Policy as Policy
from .policy import PolicySpec as PolicySpec
from .reward import Learner as Learner
from .reward import Reward as Reward
from .reward import RewardModel as RewardModel
from .reward import RewardPlugin as RewardPlugin
