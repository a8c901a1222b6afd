"""π₀ (arXiv 2410.24164) and π₀.₅ (2504.16054): flow matching beside a vision-language model."""

from .policy import Pi0Policy

__all__ = ["Pi0Policy"]
