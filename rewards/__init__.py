"""Rewards: each implements ``rlinf_vla.protocols.RewardPlugin`` and is found through an entry point."""
