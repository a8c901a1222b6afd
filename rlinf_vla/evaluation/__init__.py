"""Measure policies on fixed episodes, with results that can be verified.

May enter: what plays or counts evaluation episodes; no training. Read evaluate and statistics
(one policy, for `train` and `eval`), then a sweep of many: blocks, block_player, block_workers,
results, provenance, sweep; sequential (when a comparison is decided) and aggregate (over training
runs), which compare uses; then verify, video, and classification (of reward networks).
"""
