"""Predict how long an iteration takes under a plan, and choose the plan of `cluster.plan=auto`.

May enter: what tells plans apart; a plan never changes a result. Read: macro flow (graph) -> costs
(profile; measured by measure, measure_rollout, synthetic) -> work, machines and plans (workload,
cluster, plan) -> simulation (events, simulate, prediction) -> choice (choice,
search for the verb, monitor for a run).
"""
