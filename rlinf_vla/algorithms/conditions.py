"""Tell a policy in its instruction how good the actions are that it learns (``recap.py``)."""

from __future__ import annotations

POSITIVE = " Advantage: positive"
NEGATIVE = " Advantage: negative"
"""What follows the instruction, as in π*0.6 (arXiv 2511.14759)."""


def told(instruction: str, positive: bool = True) -> str:
    """Return the instruction with the condition, unless it has one."""
    if instruction.endswith((POSITIVE, NEGATIVE)):
        return instruction
    return instruction + (POSITIVE if positive else NEGATIVE)


def untold(instruction: str) -> str:
    """Return the instruction without the condition."""
    return instruction.removesuffix(POSITIVE).removesuffix(NEGATIVE)
