"""The workers of a run: plain classes that play, learn and score, called here or as Ray actors.

May enter: what one worker does, whoever calls it. Nothing imports Ray at its top. Read base, then
rollout and trainer; local is the pool of one process, as ``runtime/ray/pool.py`` is a cluster's.
"""
