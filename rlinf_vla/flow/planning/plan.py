"""How a macro flow is carried out: who does what where, in what pieces. It changes the speed, never the result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlinf_vla.types import UserError, require_one_of

IN_PROCESS, RAY = "in_process", "ray"
COLLOCATED, DISAGGREGATED, HYBRID = "collocated", "disaggregated", "hybrid"
RUNTIMES, PLACEMENTS, SPLITS = (IN_PROCESS, RAY), (COLLOCATED, DISAGGREGATED, HYBRID), ("none", "head")
IN_CLUSTER = (
    *("runtime", "rollout_workers", "reward_workers", "reference_workers", "trainer_ranks"),
    *("streaming", "micro_batch_size", "offload"),
)
"""What of a plan stands in recipe node ``cluster``."""
IN_ROLLOUT = ("pipeline_depth", "split")
"""And in ``rollout``."""
_AT_LEAST = {
    "rollout_workers": 1,
    "reward_workers": 0,
    "reference_workers": 0,
    "trainer_ranks": 1,
    "pipeline_depth": 1,
    "micro_batch_size": 1,
}


@dataclass(frozen=True)
class Plan:
    runtime: str = IN_PROCESS
    placement: str = COLLOCATED
    """collocated: rollouts and trainer take turns on the same devices; disaggregated: each has its own; hybrid: rollouts everywhere, the
    trainer on some of these devices."""
    rollout_workers: int = 1
    reward_workers: int = 0
    """0: the rollout workers do it."""
    reference_workers: int = 0
    """0: the trainer does it."""
    trainer_ranks: int = 1
    pipeline_depth: int = 1
    """Environment groups of a rollout worker that take turns."""
    micro_batch_size: int = 320
    """Most policy calls in one forward and backward pass of a trainer's rank."""
    streaming: bool = True
    """Shards go on as they are finished; false: every operation waits for all of them."""
    split: str = "none"
    """head: the policy's backbone runs where the trainer is, its action head in the rollout worker."""
    offload: bool = False
    """What idles on a collocated device leaves its memory."""

    def __post_init__(self) -> None:
        for key, known in (("runtime", RUNTIMES), ("placement", PLACEMENTS), ("split", SPLITS)):
            require_one_of(key, getattr(self, key), known)
        for key, least in _AT_LEAST.items():
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise UserError(f"{key}={value}: a whole number of at least {least}")
        for key in ("streaming", "offload"):
            if type(getattr(self, key)) is not bool:
                raise UserError(f"{key}={getattr(self, key)}: true or false")
        if self.runtime == IN_PROCESS and (self.rollout_workers, self.trainer_ranks, self.placement) != (1, 1, COLLOCATED):
            raise UserError("runtime=in_process is one rollout worker and one trainer in one place: use runtime=ray for more")

    def overrides(self) -> list[str]:
        """The recipe keys that make a run follow this plan."""
        keys = {f"cluster.{key}": getattr(self, key) for key in IN_CLUSTER if key != "offload" or self.offload}
        keys |= {f"rollout.{key}": getattr(self, key) for key in IN_ROLLOUT}
        return [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in keys.items()]

    def __str__(self) -> str:
        groups = f"{self.pipeline_depth} environment group{'s' * (self.pipeline_depth > 1)}" + " taking turns" * (self.pipeline_depth > 1)
        if self.runtime == IN_PROCESS:
            return f"in process, {groups}, micro-batches of {self.micro_batch_size}"
        parts = [f"Ray, {self.placement}", f"{_count(self.rollout_workers, 'rollout worker')} of {groups}"]
        parts += [_count(n, f"{kind} worker") for kind, n in (("reward", self.reward_workers), ("reference", self.reference_workers)) if n]
        parts += [_count(self.trainer_ranks, "trainer rank"), f"micro-batches of {self.micro_batch_size}"]
        parts += ["streaming" if self.streaming else "without streaming"]
        parts += ["backbone with the trainer"] * (self.split == "head") + ["what idles is off-loaded"] * self.offload
        return ", ".join(parts)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(document: Any) -> Plan:
        """Raises UserError where this is no plan's document."""
        names = [field.name for field in fields(Plan)]
        if not isinstance(document, dict) or sorted(document) != sorted(names):
            raise UserError(f"a plan has the keys {', '.join(names)}")
        return Plan(**document)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def read_json(path: Path, what: str) -> Any:
    """Raises UserError where it is not there or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{what} {path} is not JSON ({error})") from None
