"""π₀ (arXiv 2410.24164) and π₀.₅ (2504.16054): a VLM with a flow-matching action expert."""

from .policy import Pi0Policy

__all__ = ["Pi0Policy"]
