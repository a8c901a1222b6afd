"""Reward plug-ins: each implements ``rlinf_vla.core.protocols.RewardPlugin``; found by entry point."""
