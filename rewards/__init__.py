"""Reward plug-ins: each implements ``core.protocols.RewardPlugin`` as an entry point."""
