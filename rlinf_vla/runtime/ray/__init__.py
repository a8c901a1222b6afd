"""The macro flow on Ray: workers that may be lost at any moment, and the trainer.

May enter: what several processes need; an algorithm must not notice. Ray is imported inside
functions, because it reads variables that cluster sets first. Read open (what is started), cluster
(places), worker, pool (losses), serialization, shards, flow, the workers of each role, off_policy.
"""
